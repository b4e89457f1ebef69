"""What the cache costs when it never helps: cold prefill and decode with it on and off.

    python benchmarks/overhead.py [--quick] [--reps 7] [--prompt-tokens 512] [--answer-tokens 64]

Three variants answer the same prompts, each new to the cache, in turn:
on           RAM tier and SSD tier
request off  the same server, "cache": false in the body
server off   a second server with no RAM tier and no SSD folder
"""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    Answer,
    BenchmarkError,
    Corpus,
    Server,
    ask,
    interleave,
    model_folder,
    note,
    omlx_server,
    parser,
    run,
)
from report import Report, Spread, Target

ON, REQUEST_OFF, SERVER_OFF = "on", "request off", "server off"
PREFILL_LIMIT_PERCENT = 3.0
DECODE_LIMIT_PERCENT = 2.0
# The first prompts of this length touch memory that later ones find ready: not counted.
WARM_UP = 1


async def main(args: argparse.Namespace, work: Path) -> None:
    report = Report("overhead", args)
    corpus = Corpus(model_folder(args.model))
    prompts = [corpus.prompt(args.prompt_tokens) for _ in range(WARM_UP + args.reps)]
    with_cache = omlx_server(args, work, name="omlx, cache on")
    without = omlx_server(args, work, name="omlx, cache off", hot="0", ssd=False)
    async with with_cache, without:
        report.used(with_cache, without)
        runs: dict[str, tuple[Server, Mapping[str, Any]]] = {
            ON: (with_cache, {}), REQUEST_OFF: (with_cache, {"cache": False}), SERVER_OFF: (without, {}),
        }  # fmt: skip

        async def measure(name: str, rep: int) -> Answer:
            # Nobody pays for another's last writes.
            await with_cache.settle()
            await without.settle()
            server, extra = runs[name]
            return check(name, await ask(server, prompts[rep], max_tokens=args.answer_tokens, extra=extra))

        found = await interleave({name: partial(measure, name) for name in runs}, len(prompts))
    fill(report, {name: answers[WARM_UP:] for name, answers in found.items()})
    report.finish()


def check(name: str, answer: Answer) -> Answer:
    """The answer, if it is one that can be compared."""
    if answer.cached_tokens:
        raise BenchmarkError(f"cache {name}: {answer.cached_tokens} cached tokens in a prompt that is new")
    if answer.completion_tokens < 2:
        raise BenchmarkError(f"cache {name}: no decode to measure, the answer was {answer.text!r}")
    note(f"cache {name}: first token {answer.ttft:.3f} s, {answer.decode_tokens_per_s:.2f} tokens/s after it")
    return answer


def fill(report: Report, found: dict[str, list[Answer]]) -> None:
    measures: dict[str, tuple[Callable[[Answer], float], float]] = {
        "cold prefill (time to first token), s": (lambda a: a.ttft, PREFILL_LIMIT_PERCENT),
        "decode, ms a token": (lambda a: 1000 / a.decode_tokens_per_s, DECODE_LIMIT_PERCENT),
    }
    for title, (measure, limit) in measures.items():
        table = report.table(title, "cache", "median", "min to max", "runs", "cache on is slower by")
        values = {name: [measure(answer) for answer in answers] for name, answers in found.items()}
        for name, each in values.items():
            slower = 0.0 if name == ON else 100 * _median_ratio(values[ON], each) - 100
            target = Target(f"{title.split(',')[0]}: cache on slower than {name} by", slower, limit, "at most", "%")
            shown = "-" if name == ON else f"{slower:+.1f}%"
            table.add(name, *Spread.of(each).cells(), shown, targets=[] if name == ON else [target])
            report.samples[f"{title}: {name}"] = [round(value, 4) for value in each]


def _median_ratio(of: list[float], to: list[float]) -> float:
    """Median over the repetitions: both sides of a pair had the same prompt at nearly the same time."""
    return Spread.of([a / b for a, b in zip(of, to, strict=True)]).median


def options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--reps", type=int, default=7)
    made.add_argument("--prompt-tokens", type=int, default=512, help="short prompts allow more pairs")
    made.add_argument("--answer-tokens", type=int, default=64)
    args: argparse.Namespace = made.parse_args()
    if args.quick:
        args.reps, args.prompt_tokens, args.answer_tokens = 2, 100, 16
    return args


if __name__ == "__main__":
    run(main, options())
