"""Many requests at once: throughput, the longest pause when a long prompt joins, and clients that go away.

    python benchmarks/load.py [--quick] [--parts parallel,join,prefill,aborts] [--reps 5]

parallel  8 short requests at once: generated tokens per second, omlx and mlx_lm.server in turn.
join      8 running streams and a 2,500-token request: the streams' longest pause from the moment it is sent until
          3 s after its end, and KV memory against the tokens held. mlx_lm.server is shown beside.
prefill   the same with a 4,000-token prompt, until its first token.
aborts    20 clients that go away during prefill and decode; then the server must be idle, have room for a full
          house of requests again, and answer as it did before.
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import (
    Answer,
    BenchmarkError,
    Corpus,
    Server,
    ask,
    interleave,
    kv_bytes_per_token,
    model_folder,
    note,
    omlx_server,
    parser,
    peer_server,
    run,
)
from report import Report, Spread, Table, Target

STREAMS = 8
ANSWER_TOKENS = 64
# Enough to run through any window here; the clients go away when it is over.
STREAM_TOKENS = 1000
SHORT_PROMPTS = (40, 48, 56, 64, 68, 72, 76, 80)
AFTER_S = 3.0
START_TIMEOUT_S = 180.0
ABORTED_CLIENTS = 20
ABORTED_PROMPT = 1500
# The default of --max-concurrent-requests.
FULL_HOUSE = 16


@dataclass
class Bench:
    args: argparse.Namespace
    work: Path
    corpus: Corpus
    report: Report
    ours: Server
    peer: Server

    def short_prompts(self) -> list[str]:
        return [self.corpus.prompt(tokens) for tokens in SHORT_PROMPTS[: self.args.streams]]


# --- parallel short requests --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Burst:
    """Several requests sent at once. Rates are tokens per second over the whole burst."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


async def burst(server: Server, prompts: list[str], max_tokens: int) -> Burst:
    began = time.perf_counter()
    answers = await asyncio.gather(*(ask(server, prompt, max_tokens=max_tokens) for prompt in prompts))
    seconds = max(answer.arrivals[-1] for answer in answers) - began
    found = Burst(sum(answer.completion_tokens for answer in answers), seconds)
    note(f"{server.name}: {len(prompts)} requests, {found.tokens} tokens generated in {seconds:.1f} s")
    return found


async def parallel(bench: Bench) -> None:
    rounds = [bench.short_prompts() for _ in range(bench.args.reps)]

    def variant(server: Server) -> Callable[[int], Awaitable[Burst]]:
        return lambda rep: burst(server, rounds[rep], bench.args.answer_tokens)

    found = await interleave({server.name: variant(server) for server in (bench.ours, bench.peer)}, bench.args.reps)
    table = bench.report.table(
        f"{bench.args.streams} parallel requests of {SHORT_PROMPTS[0]} to {SHORT_PROMPTS[-1]} tokens, "
        f"{bench.args.answer_tokens} generated each: tokens per second in total",
        "server", "median", "min to max", "runs", "over mlx_lm.server",
    )  # fmt: skip
    rates = {name: [each.rate for each in bursts] for name, bursts in found.items()}
    base = Spread.of(rates[bench.peer.name]).median
    for name, values in rates.items():
        ratio = Spread.of(values).median / base
        target = Target("tokens per second over mlx_lm.server's", ratio, 1.0, "at least", "x")
        table.add(
            name, *Spread.of(values).cells(1), f"{ratio:.2f}x", targets=[target] if name == bench.ours.name else []
        )
        bench.report.samples[f"parallel, {name}, tokens/s"] = [round(value, 2) for value in values]


# --- a long prompt among running streams ----------------------------------------------------------


@dataclass
class Watch:
    """What running streams and the server's memory did while another request was served. Bytes and seconds."""

    joiner: Answer
    gaps: list[float]
    before_s: float
    window_s: float
    rss_before: int
    rss_peak: int
    kv: list[tuple[int, int]]
    """(KV bytes, tokens held) as the server reports them, once a second; empty if it does not."""


@dataclass
class Streams:
    """So many clients that each read one endless answer after another."""

    server: Server
    prompts: list[str]
    answers: list[Answer] = field(default_factory=list)
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    async def start(self) -> None:
        """Returns when every stream has brought ten events; raises BenchmarkError if that takes minutes."""
        self.tasks = [asyncio.create_task(self._read(prompt)) for prompt in self.prompts]
        deadline = time.monotonic() + START_TIMEOUT_S
        while len([a for a in self.answers if len(a.arrivals) >= 10]) < len(self.prompts):
            self.check()
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{self.server.name}: {len(self.prompts)} streams did not get going")
            await asyncio.sleep(0.05)

    async def _read(self, prompt: str) -> None:
        while True:
            await ask(self.server, prompt, max_tokens=STREAM_TOKENS, into=self.answers)

    def check(self) -> None:
        """A stream that failed is an error of the whole benchmark."""
        for task in self.tasks:
            if task.done():
                task.result()

    async def stop(self) -> None:
        self.check()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def longest_gap(self, start: float, end: float) -> float:
        return max(answer.longest_gap(start, end) for answer in self.answers)


async def watch(bench: Bench, server: Server, prompt: str, max_tokens: int, after_s: float) -> Watch:
    """Send one request into running streams and see what it does to them."""
    streams = Streams(server, bench.short_prompts())
    await streams.start()
    steady = time.perf_counter()
    await asyncio.sleep(AFTER_S)
    rss_before, began = server.rss(), time.perf_counter()
    memory = asyncio.create_task(_sample_memory(server))
    joiner = await ask(server, prompt, max_tokens=max_tokens)
    await asyncio.sleep(after_s)
    ended = time.perf_counter()
    await asyncio.sleep(2.0)  # so that the last pause of the window has its end
    memory.cancel()
    samples = await memory
    await streams.stop()
    found = Watch(
        joiner, [streams.longest_gap(began, ended)], streams.longest_gap(steady, began), ended - began, rss_before,
        max((rss for rss, _ in samples), default=rss_before), [kv for _, kv in samples if kv],
    )  # fmt: skip
    note(f"{server.name}: {joiner.prompt_tokens} tokens joined {len(streams.prompts)} streams, first token after "
         f"{joiner.ttft:.1f} s, longest pause {max(found.gaps):.2f} s ({found.before_s:.2f} s before)")  # fmt: skip
    await server.settle()
    return found


async def _sample_memory(server: Server) -> list[tuple[int, tuple[int, int] | None]]:
    """RSS and the server's own KV figures once a second, until cancelled."""
    samples: list[tuple[int, tuple[int, int] | None]] = []
    try:
        while True:
            samples.append((server.rss(), kv_figures(await server.probe())))
            await asyncio.sleep(1.0)
    except asyncio.CancelledError:
        return samples


def kv_figures(probe: dict[str, Any]) -> tuple[int, int] | None:
    """Bytes of the running requests' KV arrays and the tokens in them, where the server reports both."""
    held, tokens = probe.get("kv_bytes"), probe.get("kv_tokens")
    return (int(held), int(tokens)) if held and tokens else None


async def long_prompt(bench: Bench, part: str, servers: list[Server], tokens: int, max_tokens: int) -> None:
    prompt = bench.corpus.prompt(tokens)
    table = bench.report.table(
        f"{bench.args.streams} streams, a {tokens:,}-token request joins", "server", "its first token, s",
        "longest pause before, s", "longest pause, s", "KV bytes over tokens held, when most is held",
        "the same at its worst", "RSS growth, MB",
    )  # fmt: skip
    for server in servers:
        after_s = AFTER_S if max_tokens > 1 else 0.0
        found = await watch(bench, server, prompt, max_tokens, after_s)
        _add_watch(bench, table, server, found, tokens)
        bench.report.samples[f"{part}, {server.name}"] = {
            "pause_s": found.gaps, "before_s": found.before_s, "window_s": found.window_s, "kv": found.kv,
        }  # fmt: skip


def _add_watch(bench: Bench, table: Table, server: Server, found: Watch, tokens: int) -> None:
    ratio, worst = kv_ratios(found.kv, kv_bytes_per_token(model_folder(bench.args.model)))
    targets = []
    if server is bench.ours:
        targets.append(Target(f"longest pause, {tokens:,} tokens joining", max(found.gaps), 1.0, "at most", " s"))
        if ratio is not None:
            targets.append(Target("KV memory over the tokens held", ratio, 2.0, "at most", "x"))
    table.add(
        server.name, f"{found.joiner.ttft:.1f}", f"{found.before_s:.2f}", f"{max(found.gaps):.2f}",
        f"{ratio:.2f}x" if ratio is not None else "not reported",
        f"{worst:.2f}x" if worst is not None else "not reported",
        f"{(found.rss_peak - found.rss_before) / 2**20:.0f}", targets=targets,
    )  # fmt: skip


def kv_ratios(samples: list[tuple[int, int]], bytes_per_token: int) -> tuple[float | None, float | None]:
    """Bytes held over the bytes of the tokens in them: when most bytes are held, and at its worst.

    The worst comes while all rows are short: caches grow by 256 tokens at a time.
    """
    if not samples:
        return None, None
    held, tokens = max(samples)
    return held / (tokens * bytes_per_token), max(held / (tokens * bytes_per_token) for held, tokens in samples)


async def join(bench: Bench) -> None:
    await long_prompt(bench, "join", [bench.ours, bench.peer], bench.args.join_tokens, max_tokens=16)


async def prefill(bench: Bench) -> None:
    await long_prompt(bench, "prefill", [bench.ours], bench.args.prefill_tokens, max_tokens=1)


# --- clients that go away -------------------------------------------------------------------------


async def aborts(bench: Bench) -> None:
    server = bench.ours
    question = bench.corpus.prompt(60)
    before = await ask(server, question, max_tokens=16)
    await server.settle()
    rss_before = server.rss()
    began = time.perf_counter()
    await asyncio.gather(*(_go_away(bench, number) for number in range(ABORTED_CLIENTS)))
    all_left_s = time.perf_counter() - began
    if not await server.settle(timeout_s=30.0):
        raise BenchmarkError(f"{server.name} still works 30 s after its clients went away\n{server.log_tail()}")
    idle_s = time.perf_counter() - began - all_left_s
    house = [bench.corpus.prompt(40) for _ in range(FULL_HOUSE)]
    await burst(server, house, 4)
    after = await ask(server, question, max_tokens=16)
    if after.text != before.text:
        raise BenchmarkError(f"{server.name} answers {after.text!r} after the aborts, {before.text!r} before")
    running = (await server.probe()).get("running_requests", 0)
    if running:
        raise BenchmarkError(f"{server.name} reports {running} running requests with no client left")
    table = bench.report.table(
        f"{ABORTED_CLIENTS} clients go away, half during prefill and half during decode",
        "server", "last one leaves after, s", "idle again after that, s",
        f"{FULL_HOUSE} requests afterwards", "same answer as before", "RSS growth, MB",
    )  # fmt: skip
    table.add(
        server.name,
        f"{all_left_s:.1f}",
        f"{idle_s:.1f}",
        "all answered",
        "yes",
        f"{(server.rss() - rss_before) / 2**20:.0f}",
    )


async def _go_away(bench: Bench, number: int) -> None:
    """One client: even numbers leave while their long prompt is computed, odd ones after three events."""
    if number % 2:
        await ask(bench.ours, bench.corpus.prompt(40), max_tokens=STREAM_TOKENS, stop_after_events=3)
        return
    prompt = bench.corpus.prompt(ABORTED_PROMPT // (10 if bench.args.quick else 1))
    try:
        async with asyncio.timeout(0.5 + 0.1 * number):
            await ask(bench.ours, prompt, max_tokens=STREAM_TOKENS)
    except TimeoutError:
        return


# --- the program ------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Bench], Awaitable[None]]] = {
    "parallel": parallel, "join": join, "prefill": prefill, "aborts": aborts,
}  # fmt: skip


async def main(args: argparse.Namespace, work: Path) -> None:
    report = Report("load", args)
    corpus = Corpus(model_folder(args.model))
    # 20 clients at once are more than --max-concurrent-requests: the rest must wait, not fail.
    async with omlx_server(args, work) as ours, peer_server(args, work) as peer:
        report.used(ours, peer)
        bench = Bench(args, work, corpus, report, ours, peer)
        for part in args.parts:
            note(f"part {part}")
            await PARTS[part](bench)
    report.finish()


def options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help="which parts to run")
    made.add_argument("--reps", type=int, default=5, help="pairs of bursts in the part 'parallel'")
    made.set_defaults(streams=STREAMS, answer_tokens=ANSWER_TOKENS, join_tokens=2500, prefill_tokens=4000)
    args: argparse.Namespace = made.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        made.error(f"unknown parts {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if args.quick:
        args.streams, args.reps, args.answer_tokens, args.join_tokens, args.prefill_tokens = 3, 1, 16, 300, 400
    return args


if __name__ == "__main__":
    run(main, options())
