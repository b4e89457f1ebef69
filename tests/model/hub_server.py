"""A stand-in for the Hugging Face hub: the three answers that a download needs, over real HTTP."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Serves one repository. `requests` are the paths asked for; files in `broken` end halfway."""

    repo: str
    files: Mapping[str, bytes]
    url: str = ""
    requests: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)

    def downloads(self) -> list[str]:
        prefix = f"GET /{self.repo}/resolve/{REVISION}/"
        return [line.removeprefix(prefix) for line in self.requests if line.startswith(prefix)]


@contextmanager
def running_hub(hub: Hub) -> Iterator[Hub]:
    handler = type("HubHandler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {path}")
        api, resolve = f"/api/models/{self.hub.repo}", f"/{self.hub.repo}/resolve/{REVISION}/"
        if path in (api, f"{api}/revision/{REVISION}"):
            self._json(self._info())
        elif path == f"{api}/tree/{REVISION}":
            self._json(self._tree())
        elif path.startswith(resolve) and path.removeprefix(resolve) in self.hub.files:
            self._file(path.removeprefix(resolve), with_body)
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})

    def _info(self) -> dict[str, Any]:
        siblings = [{"rfilename": name, "size": len(data)} for name, data in self.hub.files.items()]
        return {"id": self.hub.repo, "sha": REVISION, "private": False, "tags": [], "siblings": siblings}

    def _tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
            for name, data in self.hub.files.items()
        ]

    def _json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str, with_body: bool) -> None:
        data = self.hub.files[name]
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": REVISION, "Accept-Ranges": "bytes"}
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self._send(206 if begin else 200, data[begin:], headers, name if with_body else None)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], name: str | None = "") -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if name in self.hub.broken:
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
        elif name is not None and self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
