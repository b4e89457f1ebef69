"""What the benchmarks share: servers, a streaming client, prompts of an exact length.

Every server is a process of its own on a free loopback port, and every time is taken by the client: it
includes HTTP, tokenizing and scheduling. Nothing here imports MLX.
"""

import argparse
import asyncio
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
from rich.console import Console
from rich.markup import escape

# It would warn on import that there is no PyTorch; only tokenizers are needed.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
from transformers import AutoTokenizer, PreTrainedTokenizerBase

T = TypeVar("T")
Message = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
STARTER = "smollm2-135m"
HOST = "127.0.0.1"
READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 15.0
# A shell and uvicorn may both report an obeyed SIGTERM as an exit by that signal.
CLEAN_EXITS = (0, -15, 143)

console = Console(stderr=True, highlight=False)


class BenchmarkError(Exception):
    """A server did not do what it promises; the benchmark ends with exit status 1."""


def note(text: str) -> None:
    """Progress for the person who waits; the report goes to standard output, this does not."""
    console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {escape(text)}", soft_wrap=True)


# --- the command line ---------------------------------------------------------------------------


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="a smoke run: small, few repetitions, proves nothing")
    made.add_argument("--model", default=STARTER, help="a name under the omlx home or a folder (default %(default)s)")
    made.add_argument("--results", type=Path, default=RESULTS, help="where the report goes (benchmarks/results)")
    made.add_argument("--exact", default="auto", choices=["auto", "on", "strict", "off"], help="omlx serve --exact")
    return made


def model_folder(name: str) -> Path:
    """The folder of a model given by name or path; raises BenchmarkError with the command that makes it."""
    home = Path(os.environ.get("OMLX_HOME") or Path.home() / ".omlx")
    for folder in (Path(name), home / "models" / name):
        if (folder / "config.json").is_file():
            return folder.resolve()
    raise BenchmarkError(f"no model {name!r} under {home / 'models'}: omlx pull {STARTER} fetches the starter model")


def kv_bytes_per_token(folder: Path) -> int:
    """Bytes of float32 keys and values that one token takes in the dense caches of this model."""
    config = json.loads((folder / "config.json").read_text())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * 2 * heads * width * 4)


def run(main: Callable[[argparse.Namespace, Path], Awaitable[None]], args: argparse.Namespace) -> None:
    """Run `main` with a scratch folder for logs and cache files, and leave the process with its exit status."""
    with tempfile.TemporaryDirectory(prefix="omlx-bench-") as work:
        try:
            asyncio.run(main(args, Path(work)))  # type: ignore[arg-type]
        except (BenchmarkError, httpx.HTTPError) as error:
            console.print(f"[red]failed:[/red] {escape(f'{type(error).__name__}: {error}')}", soft_wrap=True)
            raise SystemExit(1) from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None


# --- servers ------------------------------------------------------------------------------------


class Server:
    """One server process, an async context manager: ready and warmed up inside, stopped after.

    `model` is what a request names; `command` starts the server once a port is added.
    """

    def __init__(self, name: str, command: Sequence[str], *, model: str, ready_path: str, log: Path) -> None:
        self.name = name
        self.model = model
        self.command = tuple(command)
        self._ready_path = ready_path
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    async def __aenter__(self) -> "Server":
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.stop(check=exc[0] is None)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def process(self) -> psutil.Process:
        assert self._process is not None, f"{self.name} is not running"
        return psutil.Process(self._process.pid)

    async def start(self) -> None:
        """Start on a fresh port, wait until it is ready and answer one short request."""
        self.port = _free_port()
        command = [*self.command, "--port", str(self.port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=_environ(self._log.parent / "home"))
        try:
            await self._wait_ready()
            await ask(self, "Warm up the kernels, the tokenizer and the allocator.", max_tokens=4)
        except BaseException:
            self.stop(check=False)
            raise

    def stop(self, *, check: bool = True) -> None:
        """SIGTERM and wait; with `check`, a server that crashes or hangs on it is an error."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            code = process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
        if check and code not in CLEAN_EXITS:
            how = f"ended with status {code}" if code is not None else f"ran on for {STOP_TIMEOUT_S:g} s"
            raise BenchmarkError(f"{self.name} {how} after SIGTERM\n{self.log_tail()}")

    async def restart(self) -> None:
        self.stop()
        await self.start()

    async def _wait_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + READY_TIMEOUT_S
        async with httpx.AsyncClient(timeout=5.0) as client:
            while time.monotonic() < deadline:
                if self._process.poll() is not None:
                    raise BenchmarkError(f"{self.name} ended while starting\n{self.log_tail()}")
                try:
                    if (await client.get(self.url + self._ready_path)).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.1)
        raise BenchmarkError(f"{self.name} was not ready within {READY_TIMEOUT_S:g} s\n{self.log_tail()}")

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def rss(self) -> int:
        """Resident bytes of the process now."""
        return int(self.process.memory_info().rss)

    async def settle(self, timeout_s: float = 30.0) -> bool:
        """Wait until the process has used next to no CPU for half a second; False if that never came."""
        process, deadline = self.process, time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            before = sum(process.cpu_times()[:2])
            await asyncio.sleep(0.5)
            if sum(process.cpu_times()[:2]) - before <= 0.05:
                return True
        return False

    async def probe(self) -> dict[str, Any]:
        """What GET /admin/cache_probe says in total; empty where a server has no such route."""
        async with httpx.AsyncClient(timeout=30.0) as client:
            reply = await client.get(self.url + "/admin/cache_probe")
        body = reply.json() if reply.status_code == 200 else {}
        return {**body, **body.get("total", {})} if isinstance(body, dict) else {}

    def shown(self) -> str:
        """The command without paths of this machine, for reports."""
        names = {sys.executable: "python", str(self._log.parent): "DIR", str(Path(__file__).parent): "benchmarks"}
        text = shlex.join(self.command)
        for path, name in names.items():
            text = text.replace(path, name)
        return re.sub(r"\S*/models/", "", text).replace("python -m omlx.cli", "omlx")


def _environ(home: Path) -> dict[str, str]:
    """This process's environment without the user's settings of omlx: the flags of the report are all that count."""
    return {key: value for key, value in os.environ.items() if not key.startswith("OMLX_")} | {"OMLX_HOME": str(home)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def omlx_server(
    args: argparse.Namespace,
    work: Path,
    *,
    name: str = "omlx",
    exact: str | None = None,
    hot: str = "4GB",
    ssd: bool = True,
    extra: Sequence[str] = (),
) -> Server:
    """`omlx serve` on the model of `args`, its cache files under `work`, its RAM tier of a stated size."""
    folder = model_folder(args.model)
    command = [sys.executable, "-m", "omlx.cli", "serve", "--model", str(folder), "--host", HOST]
    command += ["--exact", exact or args.exact, "--hot-cache-max-size", hot, *extra]
    if ssd:
        command += ["--paged-ssd-cache-dir", str(cache_dir(work, name))]
    return Server(name, command, model=folder.name, ready_path="/ready", log=work / f"{_file_name(name)}.log")


def peer_server(args: argparse.Namespace, work: Path) -> Server:
    """`mlx_lm.server` on the same weights (dequantised to float32), BLAS and compile setting."""
    launcher = Path(__file__).parent / "mlx_lm_server.py"
    command = [sys.executable, str(launcher), "--model", str(model_folder(args.model)), "--host", HOST]
    command += ["--log-level", "WARNING"]
    return Server("mlx_lm.server", command, model="default_model", ready_path="/health", log=work / "mlx_lm.log")


def cache_dir(work: Path, name: str) -> Path:
    """Where the server of this name keeps its cache files."""
    return work / f"{_file_name(name)}-cache"


def _file_name(name: str) -> str:
    return re.sub(r"\W+", "-", name)


def drop_page_cache(folder: Path) -> None:
    """Ask the kernel to forget the files' pages, so that the next read comes from the device."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                # Only clean pages are dropped.
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


# --- the client ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    """One streamed answer as its client saw it. Times are seconds of `time.perf_counter`.

    `arrivals` holds one time per event that brought text or the end of the answer. A token whose text
    is held back (half a character) has no event, so a gap between arrivals is never shorter than
    the pause between tokens.
    """

    sent: float
    text: str = ""
    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def duration(self) -> float:
        return self.arrivals[-1] - self.sent

    @property
    def decode_tokens_per_s(self) -> float:
        return (self.completion_tokens - 1) / (self.arrivals[-1] - self.arrivals[0])

    @property
    def recomputed(self) -> int:
        """Prompt tokens that were not in the cache."""
        return self.prompt_tokens - self.cached_tokens

    def longest_gap(self, start: float, end: float) -> float:
        """Longest pause between two events of which some part lies between `start` and `end`."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return max((b - a for a, b in pairs if b > start and a < end), default=0.0)


async def ask(
    server: Server,
    prompt: str | list[Message],
    *,
    max_tokens: int,
    extra: Mapping[str, Any] | None = None,
    stop_after_events: int | None = None,
    into: list[Answer] | None = None,
) -> Answer:
    """Stream one greedy answer. Text goes to /v1/completions, messages go to /v1/chat/completions.

    With `stop_after_events` the client goes away after so many events, and `finish_reason` stays None.
    `into` receives the answer when it begins, for callers that watch it grow or cancel this call.
    Raises BenchmarkError on an error status, an error event or an answer without an end.
    """
    path, asked = ("completions", "prompt") if isinstance(prompt, str) else ("chat/completions", "messages")
    body: dict[str, Any] = {"model": server.model, asked: prompt, "max_tokens": max_tokens, "temperature": 0.0}
    body |= {"stream": True, "stream_options": {"include_usage": True}, **(extra or {})}
    async with httpx.AsyncClient(timeout=httpx.Timeout(900.0, connect=10.0), verify=False) as client:
        answer = Answer(sent=time.perf_counter())
        if into is not None:
            into.append(answer)
        async with client.stream("POST", f"{server.url}/v1/{path}", json=body) as reply:
            if reply.status_code != 200:
                raise BenchmarkError(f"{server.name}: status {reply.status_code}: {(await reply.aread())[:500]!r}")
            async for line in reply.aiter_lines():
                _take_event(server, line, answer)
                if stop_after_events is not None and len(answer.arrivals) >= stop_after_events:
                    return answer
    if answer.finish_reason is None or not answer.prompt_tokens:
        raise BenchmarkError(f"{server.name}: the answer had no end or no usage\n{server.log_tail()}")
    return answer


def _take_event(server: Server, line: str, answer: Answer) -> None:
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    event = json.loads(line[6:])
    if "error" in event:
        raise BenchmarkError(f"{server.name}: {event['error']}")
    for choice in event.get("choices") or ():
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        if text or choice.get("finish_reason"):
            answer.text += text
            answer.arrivals.append(time.perf_counter())
    if usage := event.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.completion_tokens = usage["completion_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


# --- prompts ------------------------------------------------------------------------------------


class Corpus:
    """Real text, cut to exact token counts: the sources of Python's standard library, each part used once."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        self._text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
        self._cursor = 0
        self._first_tokens: set[int] = set()

    def prompt(self, tokens: int) -> str:
        """The next text of exactly this many tokens; its first token differs from all earlier prompts'."""
        while self._cursor < len(self._text):
            text = self._cut(tokens)
            self._cursor = self._text.find("\n", self._cursor + len(text or "")) + 1 or len(self._text)
            if text is not None:
                return text
        raise BenchmarkError("the standard library has no more text for these prompts")

    def _cut(self, tokens: int) -> str | None:
        """The text at the cursor, or None where a cut there would change its tokens."""
        window = self._text[self._cursor : self._cursor + 12 * tokens]
        offsets = self.tokenizer(window, return_offsets_mapping=True)["offset_mapping"]
        if len(offsets) < tokens:
            return None
        text = window[: offsets[tokens - 1][1]]
        if not text.strip() or len(self.tokenizer.encode(text)) != tokens:
            return None
        first = self.tokenizer.encode(text, add_special_tokens=False)[0]
        if first in self._first_tokens:
            return None
        self._first_tokens.add(first)
        return text

    def chat_tokens(self, messages: list[Message]) -> list[int]:
        """Token ids of a conversation as the chat template writes it, ready for the next answer."""
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer.encode(str(text), add_special_tokens=False))

    def text_tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


# --- repetition ---------------------------------------------------------------------------------


async def interleave(variants: Mapping[str, Callable[[int], Awaitable[T]]], reps: int) -> dict[str, list[T]]:
    """Run every variant once per repetition, in turn, and in reverse order every other time."""
    results: dict[str, list[T]] = {name: [] for name in variants}
    for rep in range(reps):
        order = list(variants.items())
        for name, variant in order if rep % 2 == 0 else reversed(order):
            results[name].append(await variant(rep))
    return results
