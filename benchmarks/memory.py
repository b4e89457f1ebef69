"""Does the server's memory stand still once the RAM tier is full?

    python benchmarks/memory.py [--quick] [--requests 200]

Distinct short prompts fill a small RAM tier; then come the requests that count, one after another, with the
process's resident memory read after each. Growth is the median after the last 20 minus the median after requests
21 to 40 (the first 20 are left out: they touch what is touched once).
"""

import argparse
from pathlib import Path

from common import (
    Corpus,
    Server,
    ask,
    kv_bytes_per_token,
    model_folder,
    note,
    omlx_server,
    parser,
    run,
)
from report import Report, Spread, Target

from omlx.sizes import parse_size

PROMPT_TOKENS = 40
ANSWER_TOKENS = 4
WINDOW = 20
LIMIT_MB = 20.0
# Past the brim, in case the tier counts fewer bytes for a prompt than its keys and values take.
OVERFILL = 1.5


async def main(args: argparse.Namespace, work: Path) -> None:
    report = Report("memory", args)
    folder = model_folder(args.model)
    corpus = Corpus(folder)
    filling = int(OVERFILL * parse_size(args.hot) / (PROMPT_TOKENS * kv_bytes_per_token(folder))) + 1
    async with omlx_server(args, work, hot=args.hot) as server:
        report.used(server)
        fill_up = await sample(server, corpus, filling)
        counted = await sample(server, corpus, args.requests)
    report.samples = {"rss_mb_while_filling": fill_up, "rss_mb": counted}
    fill(report, filling, counted)
    report.finish()


async def sample(server: Server, corpus: Corpus, requests: int) -> list[float]:
    """RSS in MB (2^20 bytes) after each of so many new requests."""
    rss = []
    for number in range(requests):
        await ask(server, corpus.prompt(PROMPT_TOKENS), max_tokens=ANSWER_TOKENS)
        rss.append(round(server.rss() / 2**20, 2))
        if number % 20 == 19:
            note(f"{number + 1} of {requests} requests, resident {rss[-1]:.0f} MB")
    return rss


def fill(report: Report, filling: int, rss: list[float]) -> None:
    early, late = Spread.of(rss[WINDOW : 2 * WINDOW]), Spread.of(rss[-WINDOW:])
    target = Target(f"growth over {len(rss)} requests", late.median - early.median, LIMIT_MB, "at most", " MB")
    table = report.table(
        f"Resident memory, MB, after {filling} requests that filled a RAM tier of {report.args.hot}",
        "requests", "median", "min to max", "samples", "growth",
    )  # fmt: skip
    table.add(f"{WINDOW + 1} to {2 * WINDOW}", *early.cells(1), "-")
    table.add(f"last {WINDOW}", *late.cells(1), f"{target.value:+.1f}", targets=[target])


def options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--requests", type=int, default=200, help=f"at least {3 * WINDOW}")
    made.add_argument("--hot", type=_size, default="64MB", help="size of the RAM tier")
    args: argparse.Namespace = made.parse_args()
    if args.quick:
        args.requests, args.hot = 3 * WINDOW, "16MB"
    if args.requests < 3 * WINDOW:
        made.error(f"--requests must be at least {3 * WINDOW}, or the two windows meet")
    return args


def _size(text: str) -> str:
    """The text itself, as the server takes it, if it is a size."""
    parse_size(text)
    return text


if __name__ == "__main__":
    run(main, options())
