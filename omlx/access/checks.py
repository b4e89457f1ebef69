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
    return key_in(http.scope)


def key_in(scope: Scope) -> ApiKey:
    """`api_key_of` for a request's scope."""
    return cast(ApiKey, scope.get(_SCOPE_KEY, ANYBODY))


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
    """Guards the paths under /admin.

    With an admin key or API keys, a request must send the admin key or an API key marked `admin`; without either of
    those the routes are off. Nothing else tells a program on this machine from a client of a proxy on this machine:
    most proxies connect from loopback and some add no header.

    Without any keys, only programs on this machine are let through: the peer and the requested host are loopback, and
    the request has no header that only a proxy or a web page adds. A proxy that adds none gives its clients these
    routes as well as all others.
    """

    def __init__(self, app: ASGIApp, key: str | None, keys: KeyRing) -> None:
        self._app = app
        self._digest = None if key is None else hashlib.sha256(key.encode()).digest()
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not is_admin(scope["path"]):
            await self._app(scope, receive, send)
        elif fault := self._fault(scope):
            await refuse(scope["path"], fault, _BEARER if fault.status == 401 else None)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _fault(self, scope: Scope) -> Fault | None:
        if self._digest is None and not self._keys:
            return None if _is_local(scope) else _ADMIN_IS_LOCAL
        if self._digest is None and not self._keys.has_admin:
            return _ADMIN_IS_OFF
        return None if self._opens(_key_given(scope)) else _NO_ADMIN_KEY

    def _opens(self, given: bytes) -> bool:
        is_admin_key = self._digest is not None and hmac.compare_digest(hashlib.sha256(given).digest(), self._digest)
        key = self._keys.find(given)
        return is_admin_key or (key is not None and key.is_admin)


_ADMIN_IS_LOCAL = Fault(403, "admin routes are limited to localhost; set --admin-key to allow remote access")
_ADMIN_IS_OFF = Fault(
    403, "admin routes are off: set --admin-key, or mark a key in the file of --api-keys-file with admin"
)
_NO_ADMIN_KEY = Fault(401, "the admin key is missing or wrong", code="invalid_admin_key")


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
        if is_loopback(client[0]) and not (_is_this_machine(host) or host in self._hosts):
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
    return plain and is_loopback(address[0]) and _is_this_machine(asked_for)


def _is_this_machine(host: str) -> bool:
    return host == "localhost" or is_loopback(host)


def _host_name(host: str) -> str:
    """A Host header without its port; "" for one that is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether a host is an address of this machine alone."""
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
