"""What one nasty request does to everybody else: the worst gap of GET /health and of a running stream.

    python benchmarks/nasty_bodies.py [--quick] [--reps 3] [--megabytes 60]

A real `omlx serve` on a tiny model with a context of a million tokens gets one body after the other, while a client
asks for /health all the time and another one reads a stream. The first row has no request: it is what the machine does
by itself, and no other row can be better. All clients are threads of this program that only wait and note the time.
"""

import argparse
import asyncio
import base64
import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import HOST, Server, note, omlx_server, parser, run
from report import Report, Spread, Target

from omlx.testing import make_tiny_model

CONTEXT = 1 << 20
LIMIT_MS = 100.0
QUIET_S = 2.0
HEALTH_EVERY_S = 0.002
STREAM_TOKENS = 100_000
CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
)  # fmt: skip
SAID = '"messages": [{"role": "user", "content": "hi"}]'

Body = tuple[str, bytes]


def bodies(size: int) -> dict[str, Callable[[], Body]]:
    """Makers of bodies of up to `size` bytes, by what they are; each gives a path and what is sent there."""

    def filled(path: str, before: str, item: str, after: str, share: float = 1.0) -> Callable[[], Body]:
        count = int(size * share) // len(item.encode())
        return lambda: (path, (before + item * count + after).encode())

    def content(role: str, item: str, share: float = 1.0) -> Callable[[], Body]:
        return filled(
            CHAT,
            f'{{"model": "tiny", "max_tokens": 1, "messages": [{{"role": "{role}", "content": "',
            item,
            '"}]}',
            share,
        )

    def many(count: int, what: Callable[[int], str]) -> str:
        return ", ".join(map(what, range(count)))

    def image() -> Body:
        url = "data:image/png;base64," + base64.b64encode(bytes(size * 3 // 4)).decode()
        part = {"type": "image_url", "image_url": {"url": url}}
        return CHAT, json.dumps(
            {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": [part]}]}
        ).encode()

    def tools() -> Body:
        one = '{"type": "function", "function": {"name": "f%d", "parameters": {"x": "%s"}}}'
        listed = many(1000, lambda index: one % (index, "x" * (size // 1000)))
        return CHAT, f'{{"model": "tiny", "max_tokens": 1, {SAID}, "tools": [{listed}]}}'.encode()

    def biases() -> Body:
        ids = many(size // 30, lambda index: f'"{index}": 1')
        return COMPLETIONS, f'{{"model": "tiny", "max_tokens": 1, "prompt": "hi", "logit_bias": {{{ids}}}}}'.encode()

    def keys(count: int) -> Body:
        names = many(min(count, size // 20), lambda index: f'"key{index}": {index}')
        return CHAT, f'{{"model": "tiny", "max_tokens": 1, {SAID}, {names}}}'.encode()

    def messages() -> Body:
        one = '{"role": "%s", "content": "a few words"}'
        listed = many(19_999, lambda index: one % ("assistant" if index % 2 else "user"))
        return COUNT, f'{{"model": "tiny", "max_tokens": 1, "messages": [{listed}]}}'.encode()

    return {
        "empty lists in chat_template_kwargs": filled(
            CHAT, f'{{"model": "tiny", "max_tokens": 1, {SAID}, "chat_template_kwargs": {{"x": [', "[],", "[]]}}", 0.85
        ),
        "words, in one text": filled(
            COMPLETIONS, '{"model": "tiny", "max_tokens": 1, "prompt": "', "a few words ", '"}', 0.47
        ),
        "words, fewer than the characters of the context": filled(
            COMPLETIONS, '{"model": "tiny", "max_tokens": 1, "prompt": "', "a few words ", '"}', 0.2
        ),
        "content [1,1,...]": filled(
            CHAT, '{"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": [', "1,", "1]}]}"
        ),
        "nested lists": filled(CHAT, '{"model": "tiny", "max_tokens": 1, "x": ', "[", ""),
        "logit_bias of 2 million tokens": biases,
        "1,000 tools": tools,
        "numbers of 500 digits": filled(
            CHAT, f'{{"model": "tiny", "max_tokens": 1, {SAID}, "x": [', "9" * 500 + ",", "1]}", 0.19
        ),
        "290,000 members": lambda: keys(290_000),
        "115,000 members": lambda: keys(115_000),
        "20,000 messages, counted": messages,
        "an image in base64": image,
        "a Chinese text": content("user", "漢字"),
        "a Chinese text, fewer than the characters of the context": content("user", "漢字", 0.65),
        "a text of escapes": content("user", "\\n\\u00e9\\ud83d\\ude00"),
        "quoted JSON": content("tool", '{\\"a\\": [[], [], \\"b\\"]},'),
        "token ids, to text": filled("/detokenize", '{"model": "tiny", "tokens": [', "200, ", "1]}", 0.08),
        "wrong blocks": filled(
            MESSAGES, '{"model": "tiny", "max_tokens": 5, "system": [', "{},", f"{{}}], {SAID}}}", 0.007
        ),
        "texts of 16 KB": filled(
            RESPONSES, '{"model": "tiny", "input": "a", "max_output_tokens": 1, "x":[', f'"{"é" * 8000}",', "1]}", 0.3
        ),
    }  # fmt: skip


class Watch:
    """A thread that notes when something came; `worst` is the longest time between two of them."""

    def __init__(self, times: Callable[[threading.Event], Iterator[float]]) -> None:
        self._times: list[float] = []
        self._over = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(times,))

    def _run(self, times: Callable[[threading.Event], Iterator[float]]) -> None:
        try:
            for moment in times(self._over):
                self._times.append(moment)
        except Exception as error:
            self.error = error

    @contextmanager
    def running(self) -> Iterator["Watch"]:
        self._thread.start()
        while len(self._times) < 20 and self._thread.is_alive():
            time.sleep(0.01)
        try:
            yield self
        finally:
            self._over.set()
            self._thread.join()
            if self.error is not None:
                raise self.error

    def worst_ms(self, begin: float, end: float) -> float:
        """The longest time between two of them of which a part lies between `begin` and `end`."""
        pairs = zip(self._times, self._times[1:], strict=False)
        return 1000 * max((b - a for a, b in pairs if b > begin and a < end), default=float("inf"))


def health(server: Server, over: threading.Event) -> Iterator[float]:
    connection = http.client.HTTPConnection(HOST, server.port, timeout=60)
    while not over.is_set():
        connection.request("GET", "/health")
        connection.getresponse().read()
        yield time.perf_counter()
        time.sleep(HEALTH_EVERY_S)
    connection.close()


def stream(server: Server, over: threading.Event) -> Iterator[float]:
    connection = http.client.HTTPConnection(HOST, server.port, timeout=60)
    body = {"model": server.model, "prompt": "Once", "max_tokens": STREAM_TOKENS, "stream": True, "ignore_eos": True}
    connection.request("POST", COMPLETIONS, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    while not over.is_set() and answer.readline():
        yield time.perf_counter()
    connection.close()


def send(server: Server, body: Body) -> str:
    """The status of the answer, and the begin of its message."""
    path, content = body
    connection = http.client.HTTPConnection(HOST, server.port, timeout=120)
    try:
        connection.request("POST", path, content, {"content-type": "application/json"})
        answer = connection.getresponse()
        said = json.loads(answer.read())
    finally:
        connection.close()
    message = (said.get("error") or {}).get("message") or json.dumps(said)
    return f"{answer.status} {message[:70]}"


def one(server: Server, body: Body | None) -> dict[str, Any]:
    with (
        Watch(lambda over: health(server, over)).running() as of_health,
        Watch(lambda over: stream(server, over)).running() as of_stream,
    ):
        time.sleep(0.3)
        before = server.rss()
        begin = time.perf_counter()
        answer = "" if body is None else send(server, body)
        if body is None:
            time.sleep(QUIET_S)
        end = time.perf_counter()
        after = server.rss()
        time.sleep(0.3)
    return {
        "health_ms": of_health.worst_ms(begin, end + 0.2),
        "stream_ms": of_stream.worst_ms(begin, end + 0.2),
        "seconds": end - begin,
        "rss_mb": (after - before) / 1e6,
        "load": os.getloadavg()[0],
        "answer": answer,
    }


async def main(args: argparse.Namespace, work: Path) -> None:
    report = Report("nasty_bodies", args)
    args.model = str(make_tiny_model(work / "tiny", context=CONTEXT))
    table = report.table(
        f"The worst gap while one body of up to {args.megabytes} MB is answered (worst of {args.reps})",
        "body", "MB", "answer", "seconds", "/health, ms", "stream, ms", "memory, MB", "load average",
    )  # fmt: skip
    cases = {"none": None, **bodies(args.megabytes * 1_000_000)}
    async with omlx_server(args, work, hot="64MB", ssd=False) as server:
        report.used(server)
        for name, make in cases.items():
            note(name)
            body = make() if make is not None else None
            runs = [await asyncio.to_thread(one, server, body) for _ in range(args.reps)]
            report.samples[name] = runs
            worst = {key: max(run[key] for run in runs) for key in ("health_ms", "stream_ms", "rss_mb", "load")}
            targets = [
                Target(f"{name}, {what}", worst[key], LIMIT_MS, "at most", " ms")
                for what, key in (("/health", "health_ms"), ("stream", "stream_ms"))
            ]
            table.add(
                name,
                f"{len(body[1]) / 1e6:.1f}" if body is not None else "-",
                runs[0]["answer"] or "-",
                f"{Spread.of([run['seconds'] for run in runs]).median:.2f}",
                f"{worst['health_ms']:.0f}",
                f"{worst['stream_ms']:.0f}",
                f"{worst['rss_mb']:.0f}",
                f"{worst['load']:.1f}",
                targets=targets if body is not None else (),
            )
    report.finish()


def options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--reps", type=int, default=3)
    made.add_argument("--megabytes", type=int, default=60, help="the largest bodies (default %(default)s)")
    args: argparse.Namespace = made.parse_args()
    if args.quick:
        args.reps, args.megabytes = 1, 4
    return args


if __name__ == "__main__":
    run(main, options())
