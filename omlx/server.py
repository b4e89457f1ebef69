"""The HTTP server: routes, keys, errors, start and stop."""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from omlx import __version__, worker
from omlx.access.body_budget import BodyBudget
from omlx.access.checks import AdminCheck, KeyCheck, PageCheck, api_key_of, is_loopback
from omlx.access.connections import Connections, log_seldom, raise_limit, unchanged_limits
from omlx.access.cross_origin import CrossOrigin
from omlx.access.keys import KeyRing
from omlx.access.limits import KEEP_ALIVE_S, MAX_HEAD_BYTES, HeadCheck, limited, read_body
from omlx.access.request_id import RequestId, add_request_id
from omlx.admin import routes as admin
from omlx.api import anthropic, embeddings, openai, sse, tokens
from omlx.api.answering import answer_events, collect
from omlx.api.anthropic_answer import CountAnswer, MessageAnswer, MessagesErrorAnswer
from omlx.api.anthropic_body import CountBody, MessagesBody
from omlx.api.chat import ChatRequest, Engine, EnginePool, Parse, ServedModel, in_prompt_thread, prompt_tokens
from omlx.api.events import INTERNAL_FAULT, Dialect, Fault, fault_of
from omlx.api.generation import make_generation
from omlx.api.image_source import ImageSource
from omlx.api.openai_answer import ChatAnswer, CompletionAnswer, ModelAnswer, ModelsAnswer, StatusAnswer
from omlx.api.openai_body import ChatBody, CompletionBody
from omlx.api.openapi import documented
from omlx.api.pictures import Source, with_pictures
from omlx.api.refusal import PanicCheck, refuse
from omlx.api.responses.archive import ARCHIVE_NAME, Archive
from omlx.api.responses.routes import router as responses_router
from omlx.api.responses.store import ResponseStore
from omlx.errors import NotFound, OmlxError
from omlx.model.model_kind import WRITERS
from omlx.settings import Settings, usage_hint

logger = logging.getLogger("omlx.server")

# Together less than the 10 s within which a stopped server is gone.
FINISH_S = 2.0
ABORT_S = 2.0
FLUSH_S = 4.5
# Where files are written only when blocks leave RAM, all of RAM may have to be written now.
FLUSH_BACK_S = 60.0

_QUEUED = 1024  # connections that the kernel keeps until they are accepted
_CLIENT_CLOSED_REQUEST = 499
_HTTP_ERRORS = {
    404: ("no such path", "not_found"),
    405: ("this method is not allowed here", "method_not_allowed"),
}
_HTTP_CODES = {408: "request_timeout", 413: "body_too_large"}


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
        await asyncio.to_thread(app.state.responses.open)
        yield
        try:
            await stopping()
        except Exception:
            logger.exception("the engine did not stop cleanly")
        await asyncio.to_thread(app.state.responses.close)

    app = FastAPI(
        title="omlx", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.stopping = stopping
    app.state.start_error = None
    app.state.max_request_size = settings.max_request_size
    keys = KeyRing(settings)
    source = ImageSource(settings.allow_remote_images, settings.allow_local_images)
    _add_routes(app, pool, source)
    _add_anthropic_routes(app, pool, source)
    _add_responses(app, pool, source, _response_store(settings))
    app.include_router(embeddings.router(pool, read_body, lambda http: api_key_of(http).name))
    app.include_router(tokens.router(pool, read_body, source))
    app.include_router(admin.router(pool, settings, read_body, source, keys, app.state.responses))
    _add_error_handlers(app)
    _add_checks(app, settings, keys)
    return app


def _add_checks(app: FastAPI, settings: Settings, keys: KeyRing) -> None:
    """Whoever is added last is asked first."""
    origins = settings.cors_origin or ()
    app.add_middleware(PanicCheck)
    app.add_middleware(BodyBudget, keys=keys)
    app.add_middleware(
        AdminCheck, key=settings.admin_key.get_secret_value() if settings.admin_key else None, keys=keys
    )
    if keys:
        app.add_middleware(KeyCheck, keys=keys)
    else:
        app.add_middleware(PageCheck, origins=origins, host=settings.host)
    if origins:  # before the keys: a preflight has none
        app.add_middleware(CrossOrigin, origins=origins)
    app.add_middleware(HeadCheck)
    app.add_middleware(RequestId)


class _StopOnce:
    """Stops the pool, once, however often it is called; each call returns when it has stopped."""

    def __init__(self, pool: EnginePool, timeout_s: float) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._task: asyncio.Task[None] | None = None

    async def __call__(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._stop())
        await self._task

    async def _stop(self) -> None:
        # First: threads wait for what the worker processes compute, and the interpreter waits for its threads.
        worker.stop_all()
        await self._pool.stop(self._timeout_s)


def _endpoint(pool: EnginePool, parse: Parse, source: Source) -> Callable[[Request], Awaitable[Response]]:
    async def generate(http: Request) -> Response:
        return await answer(http, pool, parse, source)

    return generate


def _add_anthropic_routes(app: FastAPI, pool: EnginePool, source: Source) -> None:
    async def count(http: Request) -> Response:
        return JSONResponse({"input_tokens": await count_prompt(http, pool, anthropic.parse_count, source)})

    busy = (404, 503)
    shape = MessagesErrorAnswer
    message = documented("Message", MessagesBody, MessageAnswer, stream=True, errors=busy, error=shape)
    counted = documented("Tokens of a message", CountBody, CountAnswer, errors=busy, error=shape)
    generate = _endpoint(pool, anthropic.parse_messages, source)
    app.add_api_route("/v1/messages", generate, methods=["POST"], **message)
    app.add_api_route("/v1/messages/count_tokens", count, methods=["POST"], **counted)


def _add_routes(app: FastAPI, pool: EnginePool, source: Source) -> None:
    async def models() -> Response:
        served = [(name, model) for model in pool.models() for name in (*model.aliases, model.name)]
        return JSONResponse(openai.models_body([await _model_body(pool, model, name) for name, model in served]))

    async def model(http: Request) -> Response:
        name = http.path_params["name"]
        for known in pool.models():
            if name == known.name or name in known.aliases:
                return JSONResponse(await _model_body(pool, known, name))
        raise NotFound(f"no model {name!r} here")

    async def health() -> Response:
        return JSONResponse({"status": "ok", "version": __version__})

    async def ready() -> Response:
        if names := list(pool.loading()):  # the engine answers when it is done, so it is not asked
            return JSONResponse({"status": "loading", "loading": names}, 503)
        answers = await pool.ready()
        return JSONResponse({"status": "ready" if answers else "not ready"}, 200 if answers else 503)

    busy = (404, 503)
    chat = documented("Chat completion", ChatBody, ChatAnswer, stream=True, errors=busy)
    completion = documented("Text completion", CompletionBody, CompletionAnswer, stream=True, errors=busy)
    app.add_api_route("/v1/chat/completions", _endpoint(pool, openai.parse_chat, source), methods=["POST"], **chat)
    complete = _endpoint(pool, openai.parse_completion, source)
    app.add_api_route("/v1/completions", complete, methods=["POST"], **completion)
    app.add_api_route("/v1/models", models, methods=["GET"], **documented("The models served", answer=ModelsAnswer))
    named = documented("One model", answer=ModelAnswer, errors=[404], path=["name"])
    app.add_api_route("/v1/models/{name:path}", model, methods=["GET"], **named)
    up = documented("Whether the process is up", answer=StatusAnswer, is_open=True)
    answers = documented("Whether the engine answers", answer=StatusAnswer, is_open=True)
    answers["responses"][503] = {"model": StatusAnswer, "description": "It does not."}
    for path, probe, docs in (("/health", health, up), ("/ready", ready, answers)):
        app.add_api_route(path, probe, methods=["GET"], **docs)
        app.add_api_route(path, probe, methods=["HEAD"], include_in_schema=False)


def _response_store(settings: Settings) -> ResponseStore:
    folder = settings.paged_ssd_cache_dir if settings.ssd_on else None
    archive = None if folder is None else Archive(folder / ARCHIVE_NAME)
    return ResponseStore(archive=archive, ttl_s=settings.cache_ttl)


def _add_responses(app: FastAPI, pool: EnginePool, source: Source, store: ResponseStore) -> None:
    async def in_dialect(http: Request, parse: Parse) -> Response:
        return await answer(http, pool, parse, source)

    async def count(http: Request, parse: Callable[[dict[str, Any]], ChatRequest]) -> int:
        return await count_prompt(http, pool, parse, source)

    app.state.responses = store
    app.include_router(responses_router(in_dialect, count, lambda http: api_key_of(http).digest, store))


async def count_prompt(
    http: Request, pool: EnginePool, parse: Callable[[dict[str, Any]], ChatRequest], source: Source
) -> int:
    """How many tokens the prompt of a request has: as many as an answer's usage would say."""
    asked = (await read_body(http, parse)).asked_by(api_key_of(http))
    engine = await pool.get(asked.model)
    asked = await with_pictures(engine, asked, source)
    tokens, _ = await in_prompt_thread(engine, prompt_tokens, engine, asked)
    return len(tokens)


async def answer(http: Request, pool: EnginePool, parse: Parse, source: Source) -> Response:
    """One request from body to answer, in any dialect."""
    asked, dialect = await read_body(http, parse)
    asked = asked.asked_by(api_key_of(http))
    loading = asyncio.create_task(pool.get(asked.model))
    if asked.stream and not (await sse.done_soon(loading)):

        async def stream() -> sse.EventStreamResponse:
            return await _stream(await loading, asked, dialect, source)

        return sse.LoadingResponse(stream(), dialect, lambda: _loading_comment(pool))
    engine = await loading
    if asked.stream:
        return await _stream(engine, asked, dialect, source)
    asked = await with_pictures(engine, asked, source)
    generation = await make_generation(engine, asked, dialect.request_id)
    events = answer_events(engine, generation, model=engine.name)
    whole = await sse.until_disconnect(http.receive, collect(events))
    return JSONResponse(dialect.body(whole))


async def _stream(engine: Engine, asked: ChatRequest, dialect: Dialect, source: Source) -> sse.EventStreamResponse:
    asked = await with_pictures(engine, asked, source)
    generation = await make_generation(engine, asked, dialect.request_id)
    events = answer_events(engine, generation, model=engine.name)
    return sse.EventStreamResponse(await sse.begin(events), events, dialect, generation)


def _loading_comment(pool: EnginePool) -> str:
    """No blank line follows: some clients count those as events without data."""
    return f": loading {'; '.join(filter(None, pool.loading().values()))}".rstrip() + "\n"


async def _model_body(pool: EnginePool, model: ServedModel, name: str) -> dict[str, Any]:
    """`name`: the model's own, or an alias, whose entry names the model as its `root`."""
    context_length = None
    if model.loaded:
        engine = await (pool.get(model.name) if model.kind in WRITERS else pool.get_embedder(model.name))
        context_length = engine.context_length
    try:
        created = int(os.stat(model.path).st_mtime)
    except OSError:
        created = 0
    body = openai.model_body(name, created, context_length) | {"kind": model.kind}
    body["status"] = "loaded" if model.loaded else "loading" if model.name in pool.loading() else "not loaded"
    if name != model.name:
        body |= {"root": model.name}
    return body | ({"note": model.note} if model.note else {})


def _add_error_handlers(app: FastAPI) -> None:
    async def omlx_error(http: Request, error: Exception) -> Response:
        assert isinstance(error, OmlxError)
        return refuse(http.url.path, fault_of(error))

    async def http_error(http: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message, code = _HTTP_ERRORS.get(error.status_code, (error.detail, _HTTP_CODES.get(error.status_code)))
        return refuse(http.url.path, Fault(error.status_code, message, code=code), dict(error.headers or {}))

    async def client_gone(http: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    async def unexpected(http: Request, error: Exception) -> Response:
        logger.error("unexpected error on %r", http.url.path, exc_info=error)
        return refuse(http.url.path, INTERNAL_FAULT)

    app.add_exception_handler(OmlxError, omlx_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientDisconnect, client_gone)
    app.add_exception_handler(sse.ClientGone, client_gone)
    app.add_exception_handler(Exception, unexpected)


_ENDS_NOW = b"omlx: interrupted again, ending now: running answers and cached blocks that have no file yet are lost\n"


class Server(uvicorn.Server):
    """uvicorn that says when it is ready, and gives running answers FINISH_S to end when it stops."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._app = app
        self._on_ready = on_ready

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal stops the server; another Ctrl-C ends the process at once. Files are whole either way."""
        if self.should_exit and sig == signal.SIGINT:
            os.write(2, _ENDS_NOW)  # print may be interrupted in the middle of another print
            os._exit(128 + signal.SIGINT)
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        log_seldom(asyncio.get_running_loop())
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_QUEUED)  # uvicorn's backlog is also how many asyncio accepts at a time
        if self.started:
            # What lives as long as the server is not walked by each full collection, which took 150 ms before.
            gc.collect()
            gc.freeze()
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
    raise_limit()
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
    with unchanged_limits():
        from omlx.engine.pool import EnginePool as ModelPool  # noqa: PLC0415

    return ModelPool(
        settings.scheduler_config(),
        settings.home,
        settings.model,
        settings.adapter_path,
        options=settings.model_options(),
        model_options=settings.models,
        default_model=settings.default_model,
    )


def run(pool: admin.AdminPool, settings: Settings, listener: socket.socket) -> int:
    """Serves `pool` on a bound socket, until a signal; returns the exit status."""
    app = create_app(pool, settings)
    address, port = listener.getsockname()[:2]
    warn_if_open(settings, address)
    config = http_config(app)
    try:
        server = Server(config, app, lambda: _announce(pool, settings, port))
        with _quiet_signals(server):
            server.run([listener])
    except OSError as error:  # another process took the port meanwhile
        return _complain(f"cannot listen on {settings.host}:{port}: {error.strerror or error}")
    except SystemExit:  # how uvicorn says that the application did not start
        return _start_failed(app.state.start_error)
    return 0


def http_config(app: FastAPI, **more: Any) -> uvicorn.Config:
    """How uvicorn serves the application; its limits are those of access.limits and access.connections."""
    connections = Connections()
    return uvicorn.Config(
        app,
        lifespan="on",
        # h11 on every machine, whatever else is installed: its limits are the ones that are documented.
        http=limited(connections),
        backlog=connections.backlog,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        ws="none",
        # What goes wrong is logged here, once; each request has its own line instead of an access log.
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(FINISH_S + ABORT_S),
        **more,
    )


def warn_if_open(settings: Settings, address: str) -> None:
    """Logs whether other machines may use the server without a key; `address` is the one that it listens on."""
    if settings.asks_for_key or is_loopback(address):
        return
    if settings.allow_unauthenticated:
        logger.info("no API key: everyone who can reach %s may use this server (--allow-unauthenticated)", address)
        return
    for line in _OPEN_TO_ALL:
        logger.warning(line, address)


_OPEN_TO_ALL = (
    "********** NO API KEY: everyone who can reach %s may use this server **********",
    "They can use all its models and read and delete stored responses. Set --api-key or --api-keys-file, listen on "
    "127.0.0.1 only, or confirm with --allow-unauthenticated. (listening on %s)",
)


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
    served = sorted(pool.models(), key=lambda model: model.kind not in WRITERS)
    name, kind = (served[0].name, served[0].kind) if served else ("MODEL", "text")
    hint = usage_hint(settings.host, port, name, settings.asks_for_key, kind)
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
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s [%(request_id)s]: %(message)s", level=logging.WARNING
    )
    for handler in logging.getLogger().handlers:  # a filter of a logger would not see its children's records
        handler.addFilter(add_request_id)
    logging.getLogger("omlx").setLevel(level.upper())


@contextmanager
def _quiet_signals(server: Server) -> Iterator[None]:
    """uvicorn raises the signal that stopped it again; with these handlers that does not end the process.

    A closed terminal (SIGHUP) stops the server as SIGTERM does, unless the signal is ignored, as under nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, server.handle_exit)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
