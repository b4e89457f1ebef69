"""Where an image's bytes come from: the request itself, and, if the operator allows it, the web or a folder.

The default is that a client's request makes the server open nothing. With `--allow-remote-images` it fetches http(s)
URLs from global addresses alone: a host is resolved once, every one of its addresses is checked, and the connection
goes to the one that was checked, so a name that changes its mind in between reaches nothing. Each redirect is a new
URL. With `--allow-local-images DIR` it reads regular files below DIR.
"""

import asyncio
import base64
import binascii
import ipaddress
import os
import re
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx

from omlx.api.holding import hold
from omlx.errors import BadRequest
from omlx.model.images import MAX_BYTES
from omlx.sizes import format_size

_REDIRECTS = 3
_FETCH_WITHIN_S = 20.0
_TIMEOUT = httpx.Timeout(10.0, connect=5.0)
_ADDRESSES_TRIED = 3
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_IPV6_UNICAST = ipaddress.IPv6Network("2000::/3")
# What counts as global all the same, in some versions of Python.
_NOT_PUBLIC = tuple(
    ipaddress.ip_network(text)
    for text in (
        "168.63.129.16/32",  # Azure's services for the machine itself
        "192.0.0.0/24",  # protocol assignments
        "192.88.99.0/24",  # relays of 6to4
        "3fff::/20",  # documentation
    )
)
# What else a public host has open is nobody's picture, and this server no means to find out about it.
_WEB_PORTS = frozenset({80, 443})
_SHOWN = 80  # characters of a URL in a message
_LONGEST_URL = 64 << 10

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


async def resolve(host: str, port: int) -> Sequence[str]:
    """All addresses of a host. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def is_public(address: str) -> bool:
    """Whether an address is one of the open internet, in whatever form it is written or wrapped."""
    ip: Address = ipaddress.ip_address(address.partition("%")[0])
    inner: list[Address | None] = [ip]
    if isinstance(ip, ipaddress.IPv6Address):
        wrapped = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else ip.ipv4_mapped
        # Where another address is wrapped, that one counts.
        inner = [wrapped] if wrapped is not None else [ip, ip.sixtofour, *(ip.teredo or ())]
    return all(_is_global(one) for one in inner if one is not None)


def _is_global(ip: Address) -> bool:
    if ip.is_multicast or ip.is_reserved or (ip.version == 6 and ip not in _IPV6_UNICAST):
        return False
    return ip.is_global and not any(ip in network for network in _NOT_PUBLIC if network.version == ip.version)


@cache
def _tls() -> ssl.SSLContext:
    """Made once: it reads a file of certificates, which takes a twentieth of a second."""
    return httpx.create_ssl_context(trust_env=False)


@dataclass(frozen=True, slots=True)
class ImageSource:
    """What the operator allows. The fields behind `local_folder` are replaced in tests alone."""

    allow_remote: bool = False
    local_folder: Path | None = None
    resolve: Resolve = resolve
    is_public: Callable[[str], bool] = is_public
    ports: frozenset[int] = _WEB_PORTS
    tls: Callable[[], ssl.SSLContext] = _tls

    async def fetch(self, url: str) -> bytes:
        """The bytes behind a URL. Raises BadRequest, which does not say which image it was, and Overloaded."""
        scheme = url[:12].lower().partition(":")[0]
        if scheme == "data" and url[4:5] == ":":
            return await asyncio.to_thread(from_data_url, url)
        if len(url) > _LONGEST_URL:
            raise BadRequest(f"a URL for an image has at most {_LONGEST_URL} characters, unless it is a data: URL")
        if scheme in ("http", "https"):
            data = await self._remote(url)
        elif scheme == "file" or "://" not in url:
            data = await self._local(url)
        else:
            raise BadRequest(f"images come as data:, http(s): or file: URLs, not as {_shown(url)}")
        hold(len(data))  # those of data: URLs count in the body
        return data

    # ---- the web

    async def _remote(self, url: str) -> bytes:
        if not self.allow_remote:
            raise BadRequest("images from the web are not allowed here (the server's --allow-remote-images)")
        if not re.match(r"https?://[^/?#]", url, re.IGNORECASE):
            raise BadRequest(f"{_shown(url)} names no host")
        try:
            async with asyncio.timeout(_FETCH_WITHIN_S):
                return await self._follow(url)
        except TimeoutError:
            raise BadRequest(f"{_shown(url)} took longer than {_FETCH_WITHIN_S:.0f} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            raise BadRequest(f"{_shown(url)} could not be fetched ({type(error).__name__})") from None

    async def _follow(self, url: str) -> bytes:
        tls = await asyncio.to_thread(self.tls)
        for _ in range(_REDIRECTS + 1):
            answer = await self._get(tls, url)
            if isinstance(answer, bytes):
                return answer
            url = answer
        raise BadRequest(f"more than {_REDIRECTS} redirects")

    async def _get(self, tls: ssl.SSLContext, url: str) -> bytes | str:
        """What a URL gives, or where it redirects to."""
        if not url.lower().startswith(("http://", "https://")):
            raise BadRequest(f"a redirect to {_shown(url)} is not followed")
        target = httpx.URL(url)
        if target.scheme not in ("http", "https") or not target.host:
            raise BadRequest(f"a redirect to {_shown(url)} is not followed")
        if target.userinfo:
            raise BadRequest("a URL with a user name or password is not fetched")
        failed: httpx.HTTPError | None = None
        for address in await self._checked_addresses(target):
            # A client for each: connections are kept by address, and another name may stand for the same one.
            async with httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT, verify=tls) as client:
                try:
                    return await self._answer(client, target, address)
                except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                    failed = error
        assert failed is not None
        raise failed

    async def _answer(self, client: httpx.AsyncClient, target: httpx.URL, address: str) -> bytes | str:
        """Asks the address for the URL: the name is in the headers and in TLS."""
        # `identity`: the byte limit would not bound what a compressed answer unpacks to.
        headers = {"Host": target.netloc.decode(), "Accept-Encoding": "identity", "Accept": "image/*"}
        request = client.build_request("GET", target.copy_with(host=address), headers=headers)
        request.extensions["sni_hostname"] = target.raw_host.decode()
        answer = await client.send(request, stream=True, follow_redirects=False)
        try:
            if answer.is_redirect:
                return _joined(target, answer.headers["location"])
            if answer.status_code != 200:
                raise BadRequest(f"{_shown(str(target))} answered with status {answer.status_code}")
            return await self._body(answer)
        finally:
            await answer.aclose()

    async def _checked_addresses(self, target: httpx.URL) -> Sequence[str]:
        port = target.port or (443 if target.scheme == "https" else 80)
        addresses = await self.resolve(target.raw_host.decode(), port)
        if not addresses or not all(map(self.is_public, addresses)):
            raise BadRequest(f"{target.host[:_SHOWN]} is not an address of the open internet")
        if port not in self.ports:
            raise BadRequest(f"port {port} of {target.host[:_SHOWN]} is not asked for images: 80 and 443 are")
        return addresses[:_ADDRESSES_TRIED]

    async def _body(self, answer: httpx.Response) -> bytes:
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise BadRequest("the web server compresses what it was asked not to")
        data = bytearray()
        async for piece in answer.aiter_raw():
            data += piece
            if len(data) > MAX_BYTES:
                raise _too_large()
        return bytes(data)

    # ---- files

    async def _local(self, url: str) -> bytes:
        if self.local_folder is None:
            raise BadRequest("images in files are not allowed here (the server's --allow-local-images)")
        return await asyncio.to_thread(from_file, url, self.local_folder)


def _joined(base: httpx.URL, location: str) -> str:
    """Where a redirect leads; a URL with a scheme of its own as it is."""
    return location if re.match(r"[A-Za-z][\w+.-]*:", location) else str(base.join(location))


def from_data_url(url: str) -> bytes:
    """The bytes in a data: URL. Its media type is not looked at: the content decides.

    Works in pieces, since each step holds the GIL: at once, an image of 20 MB would stop all threads for a second.
    """
    comma = url.find(",")
    if comma < 0 or not url[max(0, comma - _SHOWN) : comma].lower().rstrip().endswith(";base64"):
        raise BadRequest("a data: URL for an image has the form data:image/png;base64,...")
    try:
        return b"".join(_decoded(_base64_pieces(url, comma + 1)))
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"the data: URL is not valid base64 ({error})") from None


def _base64_pieces(url: str, at: int) -> Iterator[bytes]:
    """The text from `at` on in base64's standard alphabet, without white space. Raises ValueError."""
    while at < len(url):
        end = at + _PIECE
        if (escape := url.rfind("%", end - 2, end)) >= 0:
            end = escape + 3
        piece = url[at:end]
        if "%" in piece:
            for code, character in _ESCAPES:
                piece = piece.replace(code, character)
        yield piece.encode("ascii").translate(_STANDARD, b" \t\r\n\v\f")
        at = end


def _decoded(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The bytes that pieces of base64 stand for. Raises BadRequest for too many, and ValueError."""
    size, rest, is_padded = 0, b"", False
    for piece in pieces:
        text, padding, more = piece.partition(b"=")
        if more.strip(b"=") or (is_padded and text):
            raise ValueError("data after the padding")
        is_padded = is_padded or bool(padding)
        text = rest + text
        whole = len(text) // 4 * 4
        rest = text[whole:]
        size += whole // 4 * 3
        if size > MAX_BYTES:
            raise _too_large()
        yield base64.b64decode(text[:whole], validate=True)
    yield base64.b64decode(rest + b"=" * (-len(rest) % 4), validate=True)


_PIECE = 256 << 10
_STANDARD = bytes.maketrans(b"-_", b"+/")
# What of base64 and of white space programs escape in URLs.
_ESCAPES = tuple(
    (code, unquote(code))
    for code in (
        "%2B",
        "%2b",
        "%2F",
        "%2f",
        "%3D",
        "%3d",
        "%2D",
        "%2d",
        "%5F",
        "%5f",
        "%20",
        "%0A",
        "%0a",
        "%0D",
        "%0d",
    )
)


def from_file(url: str, folder: Path) -> bytes:
    """A regular file below `folder`, named by a file: URL or a path. No link on the way may lead out of it."""
    name = _path_in(url) if url[:5].lower() == "file:" else url
    root = os.path.realpath(folder)
    with suppress(OSError, ValueError):
        path = os.path.realpath(os.path.join(root, name))
        if os.path.commonpath([root, path]) == root and path != root:
            return _read_below(root, os.path.relpath(path, root))
    raise BadRequest("there is no such image in the folder of --allow-local-images")


def _path_in(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets in the host that hold no address
        raise BadRequest(f"{_shown(url)} is no URL") from None
    if parts.netloc not in ("", "localhost"):
        raise BadRequest("a file: URL must not name a host")
    return unquote(parts.path)


def _read_below(root: str, path: str) -> bytes:
    """Opened step by step without following links: what was checked is what is read. Raises OSError."""
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        *folders, name = path.split(os.sep)
        for part in folders:
            deeper = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = deeper
        # Looked at before, since opening a device may do something already.
        _check_regular(os.stat(name, dir_fd=at, follow_symlinks=False))
        # Non-blocking, since opening a pipe waits for whoever writes into it.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    finally:
        os.close(at)
    with os.fdopen(file, "rb") as opened:
        _check_regular(os.fstat(file))
        data = opened.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise _too_large()
    return data


def _check_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError("not a regular file")


def _too_large() -> BadRequest:
    return BadRequest(f"more than the {format_size(MAX_BYTES)} that an image may have")


def _shown(url: str) -> str:
    """The beginning of a URL, without what a query may hold."""
    return re.sub(r"[^!-~]", "?", url[:_SHOWN].partition("?")[0])
