"""Who is let in: by API key, by admin key, and without keys whoever is no web page."""

import hashlib
import hmac
import ipaddress
from collections import Counter
from collections.abc import Collection
from typing import cast
from urllib.parse import urlsplit

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from omlx.access.keys import ANYBODY, ApiKey, KeyRing
from omlx.api.events import Fault
from omlx.api.refusal import refuse

OPEN_PATHS = frozenset({"/health", "/ready"})
RETRY_AFTER_S = 5

# Whoever sends one of these is, or comes through, somebody else than a program on this machine: a proxy, a web page.
_FROM_ELSEWHERE = (b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via", b"origin")
_SCOPE_KEY = "omlx.api_key"
_BEARER = {"www-authenticate": "Bearer"}


def api_key_of(http: Request) -> ApiKey:
    """The key that a request came with, ANYBODY where none is asked for."""
    return cast(ApiKey, http.scope.get(_SCOPE_KEY, ANYBODY))


class KeyCheck:
    """Lets nothing but OPEN_PATHS through without a key (`Authorization: Bearer` or `x-api-key`, never in the URL).

    Of a key with a limit only so many POST requests are let through at the same time. Paths under /admin are the
    AdminCheck's.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys
        self._running: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        key = self._keys.find(_key_given(scope))
        if key is None:
            fault = Fault(401, "the API key is missing or wrong", code="invalid_api_key")
            await refuse(scope["path"], fault, _BEARER)(scope, receive, send)
        elif scope["method"] != "POST":
            await self._app({**scope, _SCOPE_KEY: key}, receive, send)
        elif key.max_requests and self._running[key.name] >= key.max_requests:
            await refuse(scope["path"], _too_many(key))(scope, receive, send)
        else:
            await self._run(key, scope, receive, send)

    async def _run(self, key: ApiKey, scope: Scope, receive: Receive, send: Send) -> None:
        """Counts the request until its answer is sent, or its client gone."""
        self._running[key.name] += 1
        try:
            await self._app({**scope, _SCOPE_KEY: key}, receive, send)
        finally:
            self._running[key.name] -= 1


def _too_many(key: ApiKey) -> Fault:
    return Fault(
        429,
        f"this API key has {key.max_requests} requests at work, which is its limit; try again later",
        "rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=RETRY_AFTER_S,
    )


class AdminCheck:
    """Lets through to paths under /admin who has the admin key; if there is none, programs on this machine.

    Those show an address of this machine, ask for one, and send nothing that only a proxy or a web page does: a page
    in a browser here could otherwise empty the cache.
    """

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._digest = None if key is None else hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not is_admin(scope["path"]):
            await self._app(scope, receive, send)
        elif self._digest is None and not _is_local(scope):
            fault = Fault(403, "these routes answer programs on this machine only; --admin-key opens them to others")
            await refuse(scope["path"], fault)(scope, receive, send)
        elif self._digest is not None and not self._is_key(_key_given(scope), self._digest):
            fault = Fault(401, "the admin key is missing or wrong", code="invalid_admin_key")
            await refuse(scope["path"], fault, _BEARER)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    @staticmethod
    def _is_key(given: bytes, digest: bytes) -> bool:
        return hmac.compare_digest(hashlib.sha256(given).digest(), digest)


class PageCheck:
    """Where no API key is asked for: keeps web pages out, in a browser on this machine or in the same network.

    Browsers send the page's origin along with every POST. Only a GET to the page's own host comes without: so who
    comes from this machine has to ask for this machine, not for a name that somebody else made point to it.
    `origins` may come all the same, and their hosts and `host` may be asked for.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str], host: str) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._hosts = {host.lower(), *(_host_name(origin.partition("://")[2]) for origin in origins)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or is_open(scope["path"]):
            await self._app(scope, receive, send)
        elif fault := self._fault(dict(scope["headers"]), scope.get("client") or ("", 0)):
            await refuse(scope["path"], fault)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _fault(self, headers: dict[bytes, bytes], client: tuple[str, int]) -> Fault | None:
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1") not in self._origins:
            return Fault(403, "this web page may not use the server; --cors-origin lists pages that may", code="origin")
        host = _host_name(headers.get(b"host", b"").decode("latin-1"))
        if _is_loopback(client[0]) and not (_is_this_machine(host) or host in self._hosts):
            return Fault(403, "this server does not have the name that was asked for; an API key opens it", code="host")
        return None


def is_open(path: str) -> bool:
    return path in OPEN_PATHS or is_admin(path)


def is_admin(path: str) -> bool:
    return path == "/admin" or path.startswith("/admin/")


def _is_local(scope: Scope) -> bool:
    headers: dict[bytes, bytes] = dict(scope["headers"])
    address = scope.get("client") or ("", 0)
    asked_for = _host_name(headers.get(b"host", b"").decode("latin-1"))
    plain = not any(name in headers for name in _FROM_ELSEWHERE)
    return plain and _is_loopback(address[0]) and _is_this_machine(asked_for)


def _is_this_machine(host: str) -> bool:
    return host == "localhost" or _is_loopback(host)


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


def _key_given(scope: Scope) -> bytes:
    headers: dict[bytes, bytes] = dict(scope["headers"])
    kind, _, key = headers.get(b"authorization", b"").partition(b" ")
    if kind.lower() == b"bearer":
        return key.strip()
    return headers.get(b"x-api-key", b"").strip()
