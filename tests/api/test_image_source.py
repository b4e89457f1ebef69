"""Where images may come from: the request, the web if allowed, a folder if allowed, and nowhere else."""

import base64
import os
import socket
import ssl
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from omlx.api import image_source
from omlx.api.image_source import ImageSource, from_data_url, is_public
from omlx.errors import BadRequest
from omlx.model.images import MAX_BYTES

DATA = bytes(range(256)) * 3

# For `pictures.test`, a name that does not exist, and known to nobody else's programs.
KEY = """-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgXJqsJUmsgXyzVtZa
Hrny9lCPvzIBR4LnsZCOd48vNPqhRANCAARhpj85YC9Dpmktso+2ZBVHKDhtFsrS
u7DOeYN2lhzhAVkgiK+Je6yv5tPZZB+XZnZ01gz8Pkf9kHMhkNo3xdLr
-----END PRIVATE KEY-----
"""
CERTIFICATE = """-----BEGIN CERTIFICATE-----
MIIBsTCCAVegAwIBAgIUfir6wR83hAHMR+Qh2OT7DMCId+swCgYIKoZIzj0EAwIw
GDEWMBQGA1UEAwwNcGljdHVyZXMudGVzdDAgFw0yNjExMzAwNjI1NDRaGA8yMTI2
MTEwNjA2MjU0NFowGDEWMBQGA1UEAwwNcGljdHVyZXMudGVzdDBZMBMGByqGSM49
AgEGCCqGSM49AwEHA0IABGGmPzlgL0OmaS2yj7ZkFUcoOG0WytK7sM55g3aWHOEB
WSCIr4l7rK/m09lkH5dmdnTWDPw+R/2QcyGQ2jfF0uujfTB7MB0GA1UdDgQWBBSK
AsQKXjxlZOm7vflqHl7/WBsgCTAfBgNVHSMEGDAWgBSKAsQKXjxlZOm7vflqHl7/
WBsgCTAYBgNVHREEETAPgg1waWN0dXJlcy50ZXN0MA4GA1UdDwEB/wQEAwIChDAP
BgNVHRMBAf8EBTADAQH/MAoGCCqGSM49BAMCA0gAMEUCIFeF8dV1dp50Dz0/CXDi
y1ZrrK3WLkRRWOu8U6gwio96AiEAhkwPIfEakQhy1DJD3iwZFH3pz1gcq9pQJ86S
qQVGy5I=
-----END CERTIFICATE-----
"""


async def refused(source: ImageSource, url: str) -> str:
    with pytest.raises(BadRequest) as error:
        await source.fetch(url)
    assert len(str(error.value)) < 250 and "\n" not in str(error.value)
    return str(error.value)


# ---- in the request


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64," + base64.b64encode(DATA).decode(),
        "data:;base64," + base64.b64encode(DATA).decode(),
        "DATA:image/jpeg;charset=x;base64," + base64.b64encode(DATA).decode().rstrip("="),
        "data:image/png;base64,\n" + base64.encodebytes(DATA).decode(),
        "data:image/png;base64," + base64.urlsafe_b64encode(DATA).decode(),
        "data:image/png;base64," + base64.b64encode(DATA).decode().replace("+", "%2B").replace("=", "%3D"),
    ],
)
@pytest.mark.parametrize("piece", [256 << 10, 1, 2, 3, 4, 5, 7])
async def test_data_urls(monkeypatch: pytest.MonkeyPatch, url: str, piece: int):
    monkeypatch.setattr(image_source, "_PIECE", piece)
    assert await ImageSource().fetch(url) == DATA


@pytest.mark.parametrize(
    "url",
    ["data:image/png,abc", "data:", "data:image/png;base64,a", "data:x;base64,ab!d", "data:;base64,é"]
    + [
        "data:;base64,AA==AAAA",
        "data:;base64,AA=A",
        "data:;base64,AAAA=\n=A",
        "data:;base64,AA%41A",
        "data:;base64,AAA%",
    ],
)
@pytest.mark.parametrize("piece", [256 << 10, 1, 3])
async def test_data_urls_that_are_none(monkeypatch: pytest.MonkeyPatch, url: str, piece: int):
    monkeypatch.setattr(image_source, "_PIECE", piece)
    assert "data: URL" in await refused(ImageSource(), url)


def test_a_data_url_that_is_too_long_is_not_decoded():
    with pytest.raises(BadRequest, match="20 MB"):
        from_data_url("data:;base64," + "A" * (MAX_BYTES * 4 // 3 + 8))


async def test_a_url_that_no_server_takes_is_not_looked_at():
    assert "at most" in await refused(ImageSource(allow_remote=True), "https://a/" + "漢" * 100_000)


# ---- by default nothing is opened


@pytest.mark.parametrize("url", ["http://example.com/a.png", "https://example.com/a.png", "HTTPS://1.2.3.4/"])
async def test_the_web_is_off_and_the_message_says_what_turns_it_on(url: str):
    assert "--allow-remote-images" in await refused(ImageSource(), url)


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "/etc/passwd", "a.png", "../a.png", "C:\\a.png", "FILE:/etc/passwd"]
)
async def test_files_are_off_and_the_message_says_what_turns_them_on(url: str):
    assert "--allow-local-images" in await refused(ImageSource(), url)


@pytest.mark.parametrize("url", ["ftp://example.com/a.png", "gopher://x/", "javascript://x", "s3://bucket/a.png"])
async def test_other_schemes(url: str):
    assert "data:, http(s): or file:" in await refused(ImageSource(allow_remote=True), url)


# ---- the web

INSIDE = [
    "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.5.5", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "224.0.0.1", "255.255.255.255", "240.0.0.1", "192.0.0.8", "198.18.0.1", "::1", "::", "fe80::1", "fe80::1%eth0",
    "fc00::1", "fd12::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "2002:a00:1::",
    "64:ff9b::7f00:1", "64:ff9b::a00:1", "2001:db8::1", "100.100.100.200", "168.63.129.16", "192.88.99.1", "fec0::1",
    "::127.0.0.1", "64:ff9b:1::1", "2001::1", "3fff::1", "5f00::1", "fd00:ec2::254",
]  # fmt: skip


@pytest.mark.parametrize("address", INSIDE)
def test_addresses_that_are_not_of_the_open_internet(address: str):
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_addresses_that_are(address: str):
    assert is_public(address)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "0x7f000001", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "127.1"],
)
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_this_machine_under_all_its_names(host: str, scheme: str):
    assert "open internet" in await refused(ImageSource(allow_remote=True), f"{scheme}://{host}:1/a.png")


@pytest.mark.parametrize("found", [["10.1.2.3"], ["8.8.8.8", "127.0.0.1"], ["fd00::1"], []])
async def test_a_name_with_any_address_inside_is_refused(found: list[str]):
    async def resolve(host: str, port: int) -> Sequence[str]:
        return found

    assert "open internet" in await refused(ImageSource(True, resolve=resolve), "http://pictures.example/a.png")


class Web(BaseHTTPRequestHandler):
    """/a: data; /to/X: a redirect to X; /large: without end; /zip: compressed; others 404."""

    def do_GET(self) -> None:
        self.server.hosts.append(self.headers["Host"])  # type: ignore[attr-defined]
        if self.path.startswith("/to/"):
            self._head(302, Location=self.path[4:])
        elif self.path == "/a":
            self._head(200)
            self.wfile.write(DATA)
        elif self.path == "/zip":
            self._head(200, **{"Content-Encoding": "gzip"})
        elif self.path == "/large":
            self._head(200)
            try:
                while True:
                    self.wfile.write(bytes(1 << 20))
            except OSError:
                self.server.gave_up = True  # type: ignore[attr-defined]
        else:
            self._head(404)

    def _head(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def web() -> Iterator[tuple[ThreadingHTTPServer, ImageSource, str]]:
    """A server on loopback, and a source to which "pictures.example" is public though it lies there."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    server.hosts = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()

    async def resolve(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"] if host == "pictures.example" else ["10.0.0.1"]

    def is_here(address: str) -> bool:
        return address == "127.0.0.1"

    allowed = ImageSource(True, resolve=resolve, is_public=is_here, ports=frozenset({server.server_port}))
    try:
        yield server, allowed, f"http://pictures.example:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_an_image_from_the_web():
    with web() as (server, source, base):
        assert await source.fetch(f"{base}/a") == DATA
        assert await source.fetch(f"{base}/to/{base}/to//a") == DATA
        assert server.hosts[0] == f"pictures.example:{server.server_port}"  # type: ignore[attr-defined]


async def test_what_goes_wrong_on_the_web_is_a_bad_request():
    with web() as (_, source, base):
        assert "status 404" in await refused(source, f"{base}/none?secret=1")
        assert "secret" not in await refused(source, f"{base}/none?secret=1")
        assert "20 MB" in await refused(source, f"{base}/large")
        assert "compresses" in await refused(source, f"{base}/zip")
        assert "user name" in await refused(source, base.replace("http://", "http://me:pw@") + "/a")
        assert "redirects" in await refused(source, base + f"/to/{base}" * 6 + "/a")
    assert "could not be fetched" in await refused(source, f"{base}/a")  # the server is gone


@pytest.mark.parametrize(
    "target", ["http://inside.example/a", "http://10.0.0.1/a", "file:///etc/passwd", "ftp://x/a", "data:;base64,AAAA"]
)
async def test_a_redirect_leads_nowhere_else(target: str):
    with web() as (_, source, base):
        said = await refused(source, f"{base}/to/{target}")
    assert "open internet" in said or "is not followed" in said or "could not be fetched (InvalidURL)" in said


@pytest.mark.parametrize("url", ["http://", "https:x", "http:///a.png", "HTTP://?a", "http:/example.com/a.png"])
async def test_a_url_without_a_host_is_not_called_a_redirect(url: str):
    assert "names no host" in await refused(ImageSource(allow_remote=True), url)


async def test_a_name_is_resolved_once_and_the_checked_address_is_used(monkeypatch: pytest.MonkeyPatch):
    with web() as (_, source, base):

        def again(*args: object, **options: object) -> object:
            raise AssertionError("resolved a second time")

        monkeypatch.setattr(socket, "getaddrinfo", again)
        assert await source.fetch(f"{base}/a") == DATA


async def test_a_proxy_in_the_environment_has_no_part(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with web() as (_, source, base):
        assert await source.fetch(f"{base}/a") == DATA


@pytest.mark.parametrize("port", [22, 6379, 8080])
async def test_other_ports_of_public_hosts_are_not_asked(port: int):
    async def resolve(host: str, port: int) -> Sequence[str]:
        return ["93.184.216.34"]

    said = await refused(ImageSource(True, resolve=resolve), f"http://pictures.example:{port}/a.png")
    assert f"port {port} of pictures.example is not asked" in said


async def test_the_next_address_is_asked_if_one_does_not_answer():
    with web() as (server, source, base), socket.socket() as closed:  # bound, but it does not listen
        closed.bind(("127.0.0.3" if sys.platform == "linux" else "127.0.0.1", 0))

        async def resolve(host: str, port: int) -> Sequence[str]:
            return [closed.getsockname()[0], "127.0.0.1"]

        both = replace(source, resolve=resolve, is_public=lambda address: True)
        assert await both.fetch(f"{base}/a") == DATA
        server.server_close()


async def test_tls_is_for_the_name_and_not_for_the_address(tmp_path: Path):
    with web() as (server, source, _):
        names: list[str | None] = []
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        (tmp_path / "both.pem").write_text(KEY + CERTIFICATE)
        context.load_cert_chain(tmp_path / "both.pem")
        context.sni_callback = lambda connection, name, context: names.append(name)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)

        async def resolve(host: str, port: int) -> Sequence[str]:
            return ["127.0.0.1"]

        trusting = replace(source, resolve=resolve, tls=lambda: ssl.create_default_context(cadata=CERTIFICATE))
        assert await trusting.fetch(f"https://pictures.test:{server.server_port}/a") == DATA
        assert names == ["pictures.test"]
        assert "could not be fetched" in await refused(trusting, f"https://other.test:{server.server_port}/a")
        unknown = replace(source, resolve=resolve)
        assert "could not be fetched" in await refused(unknown, f"https://pictures.test:{server.server_port}/a")


# ---- a folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    allowed = tmp_path / "allowed"
    (allowed / "more").mkdir(parents=True)
    (allowed / "a.png").write_bytes(DATA)
    (allowed / "more" / "b c.png").write_bytes(DATA)
    (tmp_path / "secret").write_bytes(b"secret")
    (allowed / "out").symlink_to(tmp_path / "secret")
    (allowed / "up").symlink_to(tmp_path)
    (allowed / "in").symlink_to(allowed / "a.png")
    os.mkfifo(allowed / "pipe")
    (tmp_path / "allowed2").mkdir()
    (tmp_path / "allowed2" / "a.png").write_bytes(b"other")
    return allowed


async def test_files_below_the_folder(folder: Path):
    source = ImageSource(local_folder=folder)
    urls = [f"file://{folder}/a.png", f"file://localhost{folder}/a.png", f"file://{folder}/more/b%20c.png"]
    for name in ["a.png", str(folder / "a.png"), *urls, "more/b c.png", "more/../a.png", "in"]:
        assert await source.fetch(name) == DATA


OUTSIDE = [
    "../secret", "more/../../secret", "out", "up/secret", "pipe", ".", "", "more", "none.png", "a.png\0",
    "../allowed2/a.png", "/etc/passwd", "file:///etc/passwd", "file:///proc/self/environ", "%2e%2e/secret",
]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
async def test_files_elsewhere_and_what_is_no_file(folder: Path, name: str):
    said = await refused(ImageSource(local_folder=folder), name)
    assert "no such image" in said and "secret" not in said


async def test_an_escaped_way_out_of_the_folder(folder: Path):
    source = ImageSource(local_folder=folder)
    assert "no such image" in await refused(source, f"file://{folder}/%2e%2e/secret")
    assert "must not name a host" in await refused(source, "file://server/share/a.png")


@pytest.mark.parametrize("url", ["file://[", "file://]/a.png", "file://[x]/a.png", "file://\uff03/a.png"])
async def test_a_file_url_that_is_none(folder: Path, url: str):
    assert "is no URL" in await refused(ImageSource(local_folder=folder), url)


async def test_a_file_that_is_too_large(folder: Path):
    with (folder / "large.png").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    assert "20 MB" in await refused(ImageSource(local_folder=folder), "large.png")


async def test_devices_are_not_read():
    for name in ("ptmx", "/dev/zero", "null"):
        assert "no such image" in await refused(ImageSource(local_folder=Path("/dev")), name)


async def test_a_link_that_is_put_there_after_the_check_is_not_followed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The path is looked at, and only then somebody changes it: a folder, and a file, become links."""
    checked = os.path.realpath
    (tmp_path / "b c.png").write_bytes(b"secret")

    def swapped(name: str, target: Path) -> None:
        def realpath(path: str) -> str:
            found = checked(path)
            if found.endswith(".png"):
                (folder / name).rename(tmp_path / "was")
                (folder / name).symlink_to(target)
            return found

        monkeypatch.setattr(os.path, "realpath", realpath)

    swapped("more", tmp_path)
    assert "no such image" in await refused(ImageSource(local_folder=folder), "more/b c.png")
    (tmp_path / "was").rename(tmp_path / "was more")
    swapped("a.png", tmp_path / "secret")
    assert "no such image" in await refused(ImageSource(local_folder=folder), "a.png")
