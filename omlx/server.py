"""The HTTP server: routes, keys, errors, start and stop."""

import asyncio
import hmac
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from omlx import __version__
from omlx.admin import routes as admin
from omlx.api import embeddings, openai, sse, tokens
from omlx.api.answering import answer_events, collect
from omlx.api.chat import EnginePool, Parse, ServedModel
from omlx.api.events import INTERNAL_FAULT, Fault, fault_of
from omlx.api.generation import make_generation
from omlx.api.image_source import ImageSource
from omlx.api.pictures import Source, with_pictures
from omlx.errors import BadRequest, NotFound, OmlxError
from omlx.settings import Settings, usage_hint

logger = logging.getLogger("omlx.server")

MAX_BODY_BYTES = 32 * 1024 * 1024  # an image of 20 MB in base64, and text
OPEN_PATHS = frozenset({"/health", "/ready"})

# Whoever sends one of these is, or comes through, somebody else than a program on this machine: a proxy, a web page.
_FROM_ELSEWHERE = (b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via", b"origin")

# Together less than the 10 s within which a stopped server is gone.
FINISH_S = 2.0
ABORT_S = 2.0
FLUSH_S = 4.5
# Where files are written only when blocks leave RAM, all of RAM may have to be written now.
FLUSH_BACK_S = 60.0

_CLIENT_CLOSED_REQUEST = 499
_HTTP_ERRORS = {
    404: ("no such path", "not_found"),
    405: ("this method is not allowed here", "method_not_allowed"),
    413: (f"the body is larger than {MAX_BODY_BYTES // 1024**2} MB", "body_too_large"),
}


def create_app(pool: admin.AdminPool, settings: Settings) -> FastAPI:
    """The application over `pool`, which it starts and stops."""
    stopping = _StopOnce(pool, FLUSH_BACK_S if settings.cache_write_policy == "back" else FLUSH_S)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await pool.start()
        except Exception as error:
            app.state.start_error = error
            raise
        yield
        try:
            await stopping()
        except Exception:
            logger.exception("the engine did not stop cleanly")

    app = FastAPI(
        title="omlx", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.stopping = stopping
    app.state.start_error = None
    source = ImageSource(settings.allow_remote_images, settings.allow_local_images)
    _add_routes(app, pool, source)
    app.include_router(embeddings.router(pool, read_json))
    app.include_router(tokens.router(pool, read_json, source))
    app.include_router(admin.router(pool, settings, read_json, source))
    _add_error_handlers(app)
    app.add_middleware(AdminCheck, key=settings.admin_key.get_secret_value() if settings.admin_key else None)
    if settings.api_key is not None:
        app.add_middleware(KeyCheck, key=settings.api_key.get_secret_value())
    return app


class _StopOnce:
    """Stops the pool, once, however often it is called; each call returns when it has stopped."""

    def __init__(self, pool: EnginePool, timeout_s: float) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._task: asyncio.Task[None] | None = None

    async def __call__(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._pool.stop(self._timeout_s))
        await self._task


class KeyCheck:
    """Lets nothing but OPEN_PATHS through without the key (`Authorization: Bearer` or `x-api-key`).

    Paths under /admin are the AdminCheck's.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_open(scope["path"]) or _is_key(self._key, scope):
            await self._app(scope, receive, send)
            return
        fault = Fault(401, "the API key is missing or wrong", code="invalid_api_key")
        await _refuse(scope["path"], fault, {"www-authenticate": "Bearer"})(scope, receive, send)

    @staticmethod
    def _is_open(path: str) -> bool:
        return path in OPEN_PATHS or _is_admin(path)


class AdminCheck:
    """Lets through to paths under /admin who has the admin key; if there is none, programs on this machine.

    Those show an address of this machine, ask for one, and send nothing that only a proxy or a web page does: a page
    in a browser here could otherwise empty the cache.
    """

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not _is_admin(scope["path"]):
            await self._app(scope, receive, send)
        elif self._key is None and not _is_local(scope):
            fault = Fault(403, "these routes answer programs on this machine only; --admin-key opens them to others")
            await _refuse(scope["path"], fault)(scope, receive, send)
        elif self._key is not None and not _is_key(self._key, scope):
            fault = Fault(401, "the admin key is missing or wrong", code="invalid_admin_key")
            await _refuse(scope["path"], fault, {"www-authenticate": "Bearer"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _is_admin(path: str) -> bool:
    return path == "/admin" or path.startswith("/admin/")


def _is_local(scope: Scope) -> bool:
    headers: dict[bytes, bytes] = dict(scope["headers"])
    address = scope.get("client") or ("", 0)
    asked_for = _host_name(headers.get(b"host", b"").decode("latin-1"))
    plain = not any(name in headers for name in _FROM_ELSEWHERE)
    return plain and _is_loopback(address[0]) and (asked_for == "localhost" or _is_loopback(asked_for))


def _host_name(host: str) -> str:
    """A Host header without its port; "" for one that is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.removeprefix("::ffff:"))  # IPv4 on a socket of IPv6
    except ValueError:
        return False
    return address.is_loopback


def _is_key(key: bytes, scope: Scope) -> bool:
    return hmac.compare_digest(_key_given(scope), key)


def _key_given(scope: Scope) -> bytes:
    headers: dict[bytes, bytes] = dict(scope["headers"])
    kind, _, key = headers.get(b"authorization", b"").partition(b" ")
    if kind.lower() == b"bearer":
        return key.strip()
    return headers.get(b"x-api-key", b"").strip()


def _add_routes(app: FastAPI, pool: EnginePool, source: Source) -> None:
    def endpoint(parse: Parse) -> Callable[[Request], Awaitable[Response]]:
        async def generate(http: Request) -> Response:
            return await answer(http, pool, parse, source)

        return generate

    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [await _model_body(pool, model) for model in pool.models()]})

    async def model(name: str) -> Response:
        for known in pool.models():
            if known.name == name:
                return JSONResponse(await _model_body(pool, known))
        raise NotFound(f"no model {name!r} here")

    async def health() -> Response:
        return JSONResponse({"status": "ok", "version": __version__})

    async def ready() -> Response:
        answers = await pool.ready()
        return JSONResponse({"status": "ready" if answers else "not ready"}, 200 if answers else 503)

    app.add_api_route("/v1/chat/completions", endpoint(openai.parse_chat), methods=["POST"])
    app.add_api_route("/v1/completions", endpoint(openai.parse_completion), methods=["POST"])
    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", model, methods=["GET"])
    app.add_api_route("/health", health, methods=["GET", "HEAD"])
    app.add_api_route("/ready", ready, methods=["GET", "HEAD"])


async def answer(http: Request, pool: EnginePool, parse: Parse, source: Source) -> Response:
    """One request from body to answer, in any dialect."""
    asked, dialect = parse(await read_json(http))
    engine = await pool.get(asked.model)
    asked = await with_pictures(engine, asked, source)
    generation = await make_generation(engine, asked, dialect.request_id)
    events = answer_events(engine, generation, model=engine.name)
    if asked.stream:
        first = await sse.begin(events)
        return sse.EventStreamResponse(first, events, dialect, generation)
    whole = await sse.until_disconnect(http.receive, collect(events))
    return JSONResponse(dialect.body(whole))


async def read_json(http: Request) -> dict[str, Any]:
    """The body as a JSON object. Raises BadRequest, or HTTPException 413 when it is too large."""
    length = http.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 18 or int(length) > MAX_BODY_BYTES):
        raise HTTPException(413)
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413)
    try:
        # Refuses what is no UTF-8, NaN, half of a surrogate pair, deep nesting and endless digits.
        parsed = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise BadRequest("the body must be a JSON object")
    return parsed


async def _model_body(pool: EnginePool, model: ServedModel) -> dict[str, Any]:
    context_length = None
    if model.loaded:
        engine = await (pool.get(model.name) if model.kind == "text" else pool.get_embedder(model.name))
        context_length = engine.context_length
    try:
        created = int(os.stat(model.path).st_mtime)
    except OSError:
        created = 0
    return openai.model_body(model.name, created, context_length) | {"kind": model.kind}


def _add_error_handlers(app: FastAPI) -> None:
    async def omlx_error(http: Request, error: Exception) -> Response:
        assert isinstance(error, OmlxError)
        return _refuse(http.url.path, fault_of(error))

    async def http_error(http: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message, code = _HTTP_ERRORS.get(error.status_code, (error.detail, None))
        return _refuse(http.url.path, Fault(error.status_code, message, code=code), dict(error.headers or {}))

    async def client_gone(http: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    async def unexpected(http: Request, error: Exception) -> Response:
        logger.error("unexpected error on %r", http.url.path, exc_info=error)
        return _refuse(http.url.path, INTERNAL_FAULT)

    app.add_exception_handler(OmlxError, omlx_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientDisconnect, client_gone)
    app.add_exception_handler(sse.ClientGone, client_gone)
    app.add_exception_handler(Exception, unexpected)


def _refuse(path: str, fault: Fault, headers: dict[str, str] | None = None) -> Response:
    """The response for a request that gets no answer; what was sent is never logged."""
    logger.info("refused path=%r status=%d param=%s code=%s", path, fault.status, fault.param, fault.code)
    headers = dict(headers or {})
    if fault.retry_after_s is not None:
        headers["retry-after"] = str(fault.retry_after_s)
    return JSONResponse(openai.error_body(fault), fault.status, headers)


class Server(uvicorn.Server):
    """uvicorn that says when it is ready, and gives running answers FINISH_S to end when it stops."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._app = app
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        abort = asyncio.create_task(self._abort_answers())
        await super().shutdown(sockets)
        abort.cancel()
        with suppress(asyncio.CancelledError):
            await abort

    async def _abort_answers(self) -> None:
        """Stops the engine under answers that take too long: their clients are told."""
        await asyncio.sleep(FINISH_S)
        await asyncio.shield(self._app.state.stopping())


def serve(settings: Settings) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status. Prints how to reach it when it is ready."""
    _set_up_logging(settings.log_level)
    try:
        listener = bind(settings.host, settings.port)
    except OSError as error:
        return _complain(f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}")
    with listener:
        try:
            pool = _make_pool(settings)
        except OmlxError as error:
            return _complain(str(error))
        return run(pool, settings, listener)


def _make_pool(settings: Settings) -> admin.AdminPool:
    # Imported here because it loads MLX, which takes seconds: a port in use is told before.
    from omlx.engine.pool import EnginePool as ModelPool  # noqa: PLC0415

    return ModelPool(settings.scheduler_config(), settings.home, settings.model, settings.adapter_path)


def run(pool: admin.AdminPool, settings: Settings, listener: socket.socket) -> int:
    """Serves `pool` on a bound socket, until a signal; returns the exit status."""
    app = create_app(pool, settings)
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        app,
        lifespan="on",
        ws="none",
        # What goes wrong is logged here, once; each request has its own line instead of an access log.
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(FINISH_S + ABORT_S),
    )
    try:
        with _quiet_signals():
            Server(config, app, lambda: _announce(pool, settings, port)).run([listener])
    except OSError as error:  # another process took the port meanwhile
        return _complain(f"cannot listen on {settings.host}:{port}: {error.strerror or error}")
    except SystemExit:  # how uvicorn says that the application did not start
        return _start_failed(app.state.start_error)
    return 0


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: until the model is loaded, clients are refused."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def _announce(pool: EnginePool, settings: Settings, port: int) -> None:
    served = sorted(pool.models(), key=lambda model: model.kind != "text")
    name, kind = (served[0].name, served[0].kind) if served else ("MODEL", "text")
    hint = usage_hint(settings.host, port, name, settings.api_key is not None, kind)
    print(*settings.describe(), "", hint, sep="\n", flush=True)


def _start_failed(error: Exception | None) -> int:
    if isinstance(error, OmlxError):
        return _complain(str(error))
    logger.error("the server did not start", exc_info=error)
    return 1


def _complain(line: str) -> int:
    print("omlx: " + " ".join(line.split("\n")), file=sys.stderr)
    return 1


def _set_up_logging(level: str) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("omlx").setLevel(level.upper())


@contextmanager
def _quiet_signals() -> Iterator[None]:
    """uvicorn raises the signal that stopped it again; with these handlers that does not end the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
