"""Time to first token of the same prompt: cold, from RAM, and from SSD after a restart.

    python benchmarks/ttft.py [--quick] [--lengths 512,2048,4096] [--reps 5] [--cold-reps 5,5,1]

omlx and mlx_lm.server run side by side on the same model, machine and BLAS, and are asked in turn. A cold
run uses a prompt that nobody has seen. For an SSD run omlx is stopped and started again, so that the prompt
is in its files only: once with the kernel's page cache as it is, once with the files' pages dropped.
Answers are one token long: mlx_lm.server then sends its first token without waiting for a second.
"""

import argparse
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from common import (
    Answer,
    BenchmarkError,
    Corpus,
    Server,
    ask,
    cache_dir,
    drop_page_cache,
    interleave,
    model_folder,
    note,
    omlx_server,
    parser,
    peer_server,
    run,
)
from report import Report, Spread, Table, Target

ANSWER_TOKENS = 1
TARGET_LENGTH = 2048
COLD, RAM, SSD, SSD_DROPPED, AGAIN = "cold", "RAM hit", "SSD hit after restart", "same, page cache dropped", "restarted"


@dataclass
class Samples:
    """Answers by (server, prompt length, case). `beside` are the peer's RAM hits that alternated with a case."""

    answers: dict[tuple[str, int, str], list[Answer]] = field(default_factory=lambda: defaultdict(list))
    beside: dict[tuple[int, str], list[Answer]] = field(default_factory=lambda: defaultdict(list))

    def ttft(self, server: str, length: int, case: str) -> Spread | None:
        answers = self.answers.get((server, length, case))
        return Spread.of([answer.ttft for answer in answers]) if answers else None

    def as_json(self) -> dict[str, list[float]]:
        named = {f"{server}, {length}, {case}": found for (server, length, case), found in self.answers.items()}
        named |= {f"beside {case}, {length}": found for (length, case), found in self.beside.items()}
        return {name: [round(answer.ttft, 4) for answer in found] for name, found in named.items()}


class Bench:
    """The two servers, the prompts by length (the first of each is the one asked again) and what was measured."""

    def __init__(self, args: argparse.Namespace, ours: Server, peer: Server, corpus: Corpus) -> None:
        self.args = args
        self.ours, self.peer = ours, peer
        self.prompts = {
            length: [corpus.prompt(length) for _ in range(max(1, count))]
            for length, count in zip(args.lengths, args.cold_reps, strict=True)
        }
        self.samples = Samples()

    async def measure(self, server: Server, length: int, case: str, index: int = 0) -> Answer:
        answer = await ask(server, self.prompts[length][index], max_tokens=ANSWER_TOKENS)
        self._check(server, length, case, answer)
        self.samples.answers[server.name, length, case].append(answer)
        note(f"{server.name}, {length} tokens, {case}: {answer.ttft:.3f} s, {answer.cached_tokens} cached")
        return answer

    def _check(self, server: Server, length: int, case: str, answer: Answer) -> None:
        if answer.prompt_tokens != length:
            raise BenchmarkError(f"{server.name} counts {answer.prompt_tokens} tokens in a prompt of {length}")
        hit = case not in {COLD, AGAIN}
        if hit != (answer.cached_tokens > length // 2):
            raise BenchmarkError(f"{server.name}, {length} tokens, {case}: {answer.cached_tokens} tokens were cached")

    async def pairs(self, length: int, case: str, reps: int) -> None:
        """omlx in this case and the peer's RAM hit, in turn."""
        found = await interleave(
            {
                "ours": lambda _: self.measure(self.ours, length, case),
                "peer": lambda _: self.measure(self.peer, length, RAM),
            },
            reps,
        )
        self.samples.beside[length, case] += found["peer"]

    async def cold_and_ram(self) -> None:
        """Cold runs of distinct prompts with RAM hits of the first prompt between them."""
        for length, cold_reps in zip(self.args.lengths, self.args.cold_reps, strict=True):
            for rep in range(max(self.args.reps, cold_reps)):
                if rep < cold_reps:
                    await self.measure(self.ours, length, COLD, rep)
                if rep < min(cold_reps, self.args.peer_cold_reps):
                    await self.measure(self.peer, length, COLD, rep)
                await self.pairs(length, RAM, 1)

    async def ssd(self, case: str, files: Path) -> None:
        """Restart omlx and read each length's first prompt from its files, so many times."""
        for _ in range(self.args.reps):
            self.ours.stop()
            if case == SSD_DROPPED:
                drop_page_cache(files)
            await self.ours.start()
            for length in self.args.lengths:
                await self.pairs(length, case, 1)

    async def peer_restarted(self) -> None:
        """Show that the peer starts from nothing: its first prompt again, once, at the shortest length."""
        await self.peer.restart()
        await self.measure(self.peer, min(self.args.lengths), AGAIN)


async def main(args: argparse.Namespace, work: Path) -> None:
    report = Report("ttft", args)
    corpus = Corpus(model_folder(args.model))
    async with omlx_server(args, work) as ours, peer_server(args, work) as peer:
        bench = Bench(args, ours, peer, corpus)
        report.used(ours, peer)
        await bench.cold_and_ram()
        await bench.ssd(SSD, cache_dir(work, ours.name))
        await bench.ssd(SSD_DROPPED, cache_dir(work, ours.name))
        await bench.peer_restarted()
    fill(report, bench)
    report.samples = bench.samples.as_json()
    report.finish()


def fill(report: Report, bench: Bench) -> None:
    table = report.table(
        "Time to first token, seconds", "server", "prompt tokens", "case", "cached tokens", "TTFT median",
        "min to max", "runs", "speed-up over cold", "times mlx_lm.server's RAM hit",
    )  # fmt: skip
    for length in bench.args.lengths:
        for case in (COLD, RAM, SSD, SSD_DROPPED):
            _add_row(table, bench.samples, "omlx", length, case)
        for case in (COLD, RAM, AGAIN):
            _add_row(table, bench.samples, "mlx_lm.server", length, case)


def _add_row(table: Table, samples: Samples, server: str, length: int, case: str) -> None:
    found, cold = samples.ttft(server, length, case), samples.ttft(server, length, COLD)
    if found is None or cold is None:
        return
    cached = sorted({answer.cached_tokens for answer in samples.answers[server, length, case]})
    speed_up = cold.median / found.median
    beside = samples.beside.get((length, case)) if server == "omlx" else None
    ratio = found.median / Spread.of([answer.ttft for answer in beside]).median if beside else None
    table.add(
        server, length, case, ", ".join(map(str, cached)), *found.cells(),
        f"{speed_up:.1f}x" if case != COLD else "-", f"{ratio:.2f}" if ratio else "-",
        targets=_targets(length, case, speed_up, ratio),
    )  # fmt: skip


def _targets(length: int, case: str, speed_up: float, ratio: float | None) -> list[Target]:
    """The targets speak of 2,048 tokens for the speed-up and of any length for the ratio."""
    found = []
    least = {RAM: 60.0, SSD: 50.0}.get(case)
    if ratio is None or least is None:
        return []
    if length == TARGET_LENGTH:
        found.append(Target(f"{case}, {length:,} tokens, shorter than cold", speed_up, least, "at least", "x"))
    most = 1.0 if case == RAM else 1.5
    what = f"{case}, {length:,} tokens, over mlx_lm.server's RAM hit"
    return [*found, Target(what, ratio, most, "at most", "x")]


def options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--lengths", type=_numbers, default=[512, 2048, 4096], help="prompt lengths in tokens")
    made.add_argument("--reps", type=int, default=5, help="pairs of RAM hits, and restarts for SSD hits")
    made.add_argument("--cold-reps", type=_numbers, default=[5, 5, 1], help="cold runs of omlx, one per length")
    made.add_argument("--peer-cold-reps", type=int, default=1, help="cold runs of mlx_lm.server at each length")
    args: argparse.Namespace = made.parse_args()
    if args.quick:
        args.lengths, args.cold_reps, args.reps = [256], [1], 2
    if len(args.lengths) != len(args.cold_reps):
        made.error("--lengths and --cold-reps must have as many numbers")
    return args


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    run(main, options())
