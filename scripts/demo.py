"""The product at work: one question over a document, asked three times.

Starts `omlx serve` as a user would and measures from outside, over HTTP: cold, again with the
prompt's KV in RAM, and again after the server was stopped and started, with the KV on SSD. Exits
non-zero, with a line that says why, when an answer or a count of cached tokens is not as it
should be. Leaves no process and no file behind.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

MODEL = "smollm2-135m"
DOCUMENT = Path(__file__).resolve().parent.parent / "LICENSE"
DOCUMENT_CHARS = 10_315  # with the question and the chat template 2,048 tokens
QUESTION = "In one sentence: what does this license say about trademarks?"
ANSWER_TOKENS = 32
PROMPT_TOKENS = range(1_900, 2_200)
LEAST_SPEED_UP = 5.0  # far below what is usual, so that a busy machine passes
START_WITHIN_S = 120.0
STOP_WITHIN_S = 20.0
COLUMNS = ("prompt tokens", "cached tokens", "time to first token", "speed-up")

console = Console()


class DemoError(Exception):
    """A row is not what it should be, or the server did not do its part."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request gave: text, usage, and seconds to the first token as the client saw them."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Server:
    """A running `omlx serve`."""

    process: subprocess.Popen[bytes]
    url: str
    key: str
    log: Path

    def client(self) -> httpx.Client:
        # trust_env off: a proxy in the environment has no part in a talk with this machine.
        return httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}, timeout=300, trust_env=False
        )


def main() -> int:
    return perform(lambda folder: show(*ask_three_times(folder)))


def perform(play: Callable[[Path], None]) -> int:
    """Runs a demo in a folder of its own, which is removed; returns the exit status."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    folder = Path(tempfile.mkdtemp(prefix="omlx-demo-"))
    try:
        play(folder)
    except DemoError as error:
        console.print(f"demo failed: {error}", style="bold red", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def ask_three_times(folder: Path) -> tuple[Answer, Answer, Answer]:
    """Cold, RAM and SSD, each checked as soon as it is there."""
    with running_server(folder) as server:
        cold = ask(server, "cold", body())
        check_cold(cold)
        ram = ask(server, "again, from RAM", body())
        check_warm("RAM", ram, cold)
    with running_server(folder) as server:
        ssd = ask(server, "after a restart, from SSD", body())
        check_warm("SSD", ssd, cold)
    return cold, ram, ssd


@contextmanager
def running_server(folder: Path, model: str = MODEL) -> Iterator[Server]:
    """`omlx serve` on a free port, ready; stopped when the block ends, however it ends."""
    port, key, log = free_port(), secrets.token_hex(16), folder / "server.log"
    with log.open("wb") as output:
        # A session of its own: Ctrl-C reaches this program alone, which then stops the server.
        process = subprocess.Popen(
            serve_command(folder / "cache", port, key, model),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=plain_environment(),
            start_new_session=True,
        )
    server = Server(process, f"http://127.0.0.1:{port}", key, log)
    try:
        wait_until_ready(server)
        yield server
    finally:
        stop(process)


def serve_command(cache: Path, port: int, key: str, model: str) -> list[str]:
    """The command line; settings that matter here are flags, whatever a settings file says."""
    omlx = Path(sys.executable).with_name("omlx")
    if not omlx.exists():
        raise DemoError(f"no omlx command beside {sys.executable}; run `make demo`")
    flags = {
        "--model": model,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--api-key": key,
        "--paged-ssd-cache-dir": str(cache),
        "--paged-ssd-cache-max-size": "2GB",
        "--hot-cache-max-size": "1GB",
        "--max-kv-cache-memory": "2GB",
        "--block-size": "64",
        "--exact": "auto",
        "--log-level": "info",
    }
    return [str(omlx), "serve", *(word for flag in flags.items() for word in flag)]


def plain_environment() -> dict[str, str]:
    """The environment without omlx settings; OMLX_HOME stays, for the model lies there."""
    return {name: value for name, value in os.environ.items() if name == "OMLX_HOME" or not name.startswith("OMLX_")}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + START_WITHIN_S
    with console.status("starting omlx serve"), server.client() as client:
        while time.monotonic() < deadline:
            if server.process.poll() is not None:
                raise DemoError(f"omlx serve ended with status {server.process.returncode}:\n{last_lines(server.log)}")
            try:
                if client.get("/ready", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(0.1)
    raise DemoError(f"omlx serve was not ready after {START_WITHIN_S:.0f} s:\n{last_lines(server.log)}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, which writes the cache out; SIGKILL if that takes too long."""
    process.terminate()
    try:
        process.wait(STOP_WITHIN_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


def last_lines(log: Path, count: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])


def ask(server: Server, title: str, body: dict[str, Any]) -> Answer:
    """A chat completion, streamed, with a bar while the prompt is worked on."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, server.client() as client:
        bar = progress.add_task(title, total=None, note="prefill")
        started = time.monotonic()
        try:
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise DemoError(f"status {response.status_code}: {response.read().decode(errors='replace')}")
                answer = read_stream(response.iter_lines(), started, lambda *done: show_prefill(progress, bar, *done))
        except httpx.TransportError as error:
            raise DemoError(f"the connection broke ({error!r}):\n{last_lines(server.log)}") from error
        progress.update(bar, total=1, completed=1, note=f"first token after {seconds(answer.ttft_s)}")
    return answer


def body() -> dict[str, Any]:
    document = DOCUMENT.read_text("utf-8")[:DOCUMENT_CHARS]
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{document}\n\n{QUESTION}"}],
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def show_prefill(progress: Progress, bar: TaskID, done: int, total: int) -> None:
    progress.update(bar, completed=done, total=total, note=f"prefill {done:,} of {total:,} tokens")


def read_stream(lines: Iterable[str], started: float, on_prefill: Callable[[int, int], None]) -> Answer:
    """The answer in a stream of server-sent events. While the prompt is worked on, the server sends
    comments, ": prefill 512/2048", for `on_prefill`.
    """
    parts: list[str] = []
    ttft, usage = None, None
    for line in lines:
        if line.startswith(": prefill "):
            done, _, total = line.removeprefix(": prefill ").partition("/")
            on_prefill(int(done), int(total))
        elif line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise DemoError(f"the server answered with an error: {event['error']}")
            usage = event.get("usage") or usage
            text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            if text and ttft is None:
                ttft = time.monotonic() - started
            parts.append(text)
    if ttft is None or usage is None:
        raise DemoError("the stream ended without text or without usage")
    return Answer("".join(parts), usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], ttft)


def check_cold(cold: Answer) -> None:
    if cold.prompt_tokens not in PROMPT_TOKENS:
        raise DemoError(f"the prompt has {cold.prompt_tokens} tokens instead of about 2,000")
    if cold.cached_tokens != 0:
        raise DemoError(f"cold: {cold.cached_tokens} tokens came from a cache that was empty")


def check_warm(row: str, warm: Answer, cold: Answer) -> None:
    """All but the last token of the prompt from the cache, the same answer, and sooner."""
    if warm.prompt_tokens != cold.prompt_tokens or warm.cached_tokens != cold.prompt_tokens - 1:
        raise DemoError(
            f"{row}: {warm.cached_tokens} of {warm.prompt_tokens} prompt tokens were cached "
            f"instead of {cold.prompt_tokens - 1} of {cold.prompt_tokens}"
        )
    if warm.text != cold.text:
        raise DemoError(f"{row}: the answer differs from the cold one:\n{warm.text!r}\n{cold.text!r}")
    if warm.ttft_s * LEAST_SPEED_UP > cold.ttft_s:
        raise DemoError(f"{row}: first token after {seconds(warm.ttft_s)}, cold after {seconds(cold.ttft_s)}")


def show(cold: Answer, ram: Answer, ssd: Answer) -> None:
    table = Table("", *(Column(title, justify="right") for title in COLUMNS))
    for name, row in (("cold", cold), ("RAM", ram), ("SSD", ssd)):
        speed_up = f"{cold.ttft_s / row.ttft_s:.0f}x"
        table.add_row(name, f"{row.prompt_tokens:,}", f"{row.cached_tokens:,}", seconds(row.ttft_s), speed_up)
    console.print(table)
    console.print(f"Three times the same answer: {cold.text.strip()}", markup=False, highlight=False)


def seconds(time_s: float) -> str:
    return f"{time_s:.2f} s"


if __name__ == "__main__":
    sys.exit(main())
