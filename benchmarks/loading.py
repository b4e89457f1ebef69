"""How long does a running stream wait for its next token while another model is loaded?

    python benchmarks/loading.py [--quick] [--rounds 3]

Starts no server. A stream of one copy of a model runs while a second copy is loaded; then a third is loaded alone.
"""

import argparse
import asyncio
import itertools
import time
from pathlib import Path

from common import model_folder, note, parser, run
from report import Report, Target

from omlx.engine.pool import EnginePool
from omlx.request import Request, SamplingParams
from omlx.scheduler import SchedulerConfig
from omlx.testing import make_tiny_model

MOST_WAIT_S = 1.0
WARM_TOKENS = 10


async def main(args: argparse.Namespace, work: Path) -> None:
    source = make_tiny_model(work / "source") if args.model == "tiny" else model_folder(args.model)
    (work / "models").mkdir()
    for name in ("streaming", "beside", "alone"):
        (work / "models" / name).symlink_to(source)
    report = Report("loading", args)
    table = report.table(
        "A stream while another model is loaded", "round", "longest wait before, s", "longest wait meanwhile, s",
        "load beside the stream, s", "load alone, s",
    )  # fmt: skip
    worst = 0.0
    for number in range(1, args.rounds + 1):
        before, meanwhile, beside, alone = await measure(work)
        worst = max(worst, meanwhile)
        table.add(number, *(f"{value:.2f}" for value in (before, meanwhile, beside, alone)))
        note(f"round {number}: {meanwhile:.2f} s")
    target = Target("longest wait of a stream while a model is loaded, s", round(worst, 2), MOST_WAIT_S, "at most")
    table.add("worst", "", f"{worst:.2f}", "", "", targets=[target])
    report.finish()


async def measure(home: Path) -> tuple[float, float, float, float]:
    pool = EnginePool(SchedulerConfig(), home)
    await pool.start()
    try:
        engine = await pool.get("streaming")
        times: list[float] = []
        warm, loaded = asyncio.Event(), asyncio.Event()

        async def stream() -> None:
            sampling = SamplingParams(max_tokens=3000, temperature=0, ignore_eos=True)
            async for _ in engine.generate(Request("stream", list(range(20, 60)), sampling)):
                times.append(time.monotonic())
                if len(times) == WARM_TOKENS:
                    warm.set()
                if loaded.is_set():
                    return

        running = asyncio.create_task(stream())
        await warm.wait()
        started = time.monotonic()
        await pool.get("beside")
        ended = time.monotonic()
        loaded.set()
        await running
        waits = list(itertools.pairwise(times))
        before = max(b - a for a, b in waits if b <= started)
        meanwhile = max(b - a for a, b in waits if b > started)
        alone = time.monotonic()
        await pool.get("alone")
        return before, meanwhile, ended - started, time.monotonic() - alone
    finally:
        await pool.stop(10.0)


def options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=3)
    args: argparse.Namespace = made.parse_args()
    if args.quick:
        args.model, args.rounds = "tiny", 1
    return args


if __name__ == "__main__":
    run(main, options())
