"""What clients send is bounded, all bodies together."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omlx.access.checks import key_in
from omlx.access.keys import KeyRing
from omlx.api.holding import ByteBudget, Held, current

MAX_HELD_BYTES = 1 << 30


class BodyBudget:
    """Counts the bodies of requests until they are answered; beyond the limit reading one raises Overloaded.

    Belongs inside KeyCheck, so that each API key has its share.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys
        self._budget = ByteBudget(MAX_HELD_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._budget.tenants = max(1, len(self._keys))
        held = Held(self._budget, key_in(scope).name)

        async def counted() -> Message:
            message = await receive()
            held.add(len(message.get("body", b"")))
            return message

        token = current.set(held)
        try:
            await self._app(scope, counted, send)
        finally:
            current.reset(token)
            held.release()
