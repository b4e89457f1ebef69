"""What browsers ask before a page of another origin may use the server (CORS)."""

from collections.abc import Collection

from fastapi.responses import Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omlx.access.checks import is_admin

_PREFLIGHT_S = 600


class CrossOrigin:
    """Lets pages of the listed origins ask and read; for all others nothing is said, so browsers refuse.

    Never for any origin (`*`), never with a browser's own credentials (a page has to have the key), and never for
    paths under /admin.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or is_admin(scope["path"]):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin", "")
        listed = origin in self._origins
        if listed and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(origin, headers)(scope, receive, send)
            return

        async def send_readable(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                answer.add_vary_header("Origin")
                if listed:
                    answer["access-control-allow-origin"] = origin
                    answer["access-control-expose-headers"] = "retry-after, x-request-id"
            await send(message)

        await self._app(scope, receive, send_readable)


def _preflight(origin: str, asked: Headers) -> Response:
    answer = {
        "access-control-allow-origin": origin,
        "access-control-allow-methods": "GET, POST, DELETE",
        "access-control-max-age": str(_PREFLIGHT_S),
        "vary": "Origin, Access-Control-Request-Headers",
    }
    # Clients send many headers of their own. Whoever is listed may send any: none of them opens anything but a key.
    if wanted := asked.get("access-control-request-headers"):
        answer["access-control-allow-headers"] = wanted
    return Response(status_code=204, headers=answer)
