"""How large are the differences that exact mode avoids, and where do they come from?

    python benchmarks/exactness.py [--quick] [--models NAME ...] [--tokens 300]

Every variant is a process of its own that computes the same prompt and a greedy answer: other chunk edges (with the
passes that may be cut anywhere, and with stock ones), another number of BLAS threads, another BLAS kernel, other
requests in the batch. Its KV, logits and log-probabilities
are compared with those of the first process. No server is started; that an answer is the same from RAM, from SSD and
after a restart is what the tests show.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import omlx  # loads the BLAS, which has to come before MLX

# isort: split
import mlx.core as mx
import numpy as np
import numpy.typing as npt
from common import Corpus, model_folder, note, parser
from report import Report, Target

from omlx import blas
from omlx.arrays import as_numpy
from omlx.cache.grid import PrefillGrid
from omlx.model import loader
from omlx.model.decode_batch import DecodeBatch, DecodeOutput, DecodeRow
from omlx.model.runner import TextRunner
from omlx.model.sampling import make_sampler
from omlx.request import SamplingParams
from omlx.testing import make_tiny_model

ANSWER_TOKENS = 16
BLOCK_SIZE = 64
CHUNK = 512
COST_ROUNDS = 3
KERNELS = ("Haswell", "Sandybridge", "Nehalem")
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Variant:
    """How a process differs from the first: prefill `edges` ("grid", or tokens a chunk), rows beside, environment.

    `stock`: passes as mlx-lm builds them."""

    name: str
    stock: bool = False
    edges: str = "grid"
    beside: int = 0
    env: Mapping[str, str] = field(default_factory=dict)


class State(NamedTuple):
    """What a process computed. `kv` (layers x 2, heads, tokens, dim): the prompt's and the answer's."""

    kv: FloatArray
    logits: FloatArray
    logprobs: FloatArray
    answer: list[int]


# --- one process --------------------------------------------------------------------------------


def compute(folder: Path, prompts: Sequence[list[int]], edges: str, stock: bool) -> State:
    """Prefills the first prompt, then decodes it beside the others."""
    runner = TextRunner(loader.load(folder), exact=not stock)
    batch = DecodeBatch(runner.decoder)
    for number, prompt in enumerate(prompts[1:], 1):
        caches = prefill(runner, prompt[:-1], "grid")
        batch.add(row(runner, f"beside {number}", prompt, caches))
    prompt = prompts[0]
    caches = prefill(runner, prompt[:-1], edges)
    logits = runner.logits(prompt[-1], caches)
    first = int(mx.argmax(logits).item())
    found = [(first, logprobs_of(logits)[0])]
    batch.add(row(runner, "asked", [*prompt, first], caches))
    while len(found) < ANSWER_TOKENS:
        for output in batch.step():
            if isinstance(output, DecodeOutput) and output.row_id == "asked":
                found.append((output.token, np.array(output.logprobs)))
    kept, held = batch.remove("asked")
    arrays = [as_numpy(array)[0, :, : len(held)] for cache in kept for array in (cache.keys, cache.values)]
    chosen = [logprobs[token] for token, logprobs in found]
    return State(np.stack(arrays), np.array(logits)[0], np.array(chosen), [token for token, _ in found])


def prefill(runner: TextRunner, tokens: list[int], edges: str) -> list[Any]:
    caches, grid, position = runner.new_cache(), PrefillGrid(BLOCK_SIZE), 0
    while position < len(tokens):
        end = grid.next_edge(position) if edges == "grid" else position + int(edges)
        runner.prefill(tokens[position:end], caches)
        position = end
    return caches


def row(runner: TextRunner, name: str, tokens: list[int], caches: list[Any]) -> DecodeRow:
    greedy = make_sampler(SamplingParams(max_tokens=1, temperature=0), runner.vocab_size, seed=0, drawn=0)
    return DecodeRow(name, tokens[-1], False, tokens[:-1], caches, 10_000, greedy, [], frozenset())


def logprobs_of(logits: mx.array) -> FloatArray:
    found: FloatArray = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    return found


def child(args: argparse.Namespace) -> None:
    prompts = json.loads(args.prompts.read_text())
    state = compute(args.folder, prompts, args.edges, args.stock)
    np.savez(args.state, kv=state.kv, logits=state.logits, logprobs=state.logprobs, answer=state.answer)


# --- all of them --------------------------------------------------------------------------------


def main(args: argparse.Namespace) -> None:
    assert omlx.blas.problem() is None or not omlx.blas.is_cpu_build(), omlx.blas.problem()
    report = Report("exactness", args)
    with tempfile.TemporaryDirectory() as work:
        for name in args.models:
            folder = make_tiny_model(Path(work) / "tiny") if name == "tiny" else model_folder(name)
            compare(report, name, folder, args.tokens, Path(work))
            operations(report, name, folder)
            cost(report, name, folder, args.prefill_tokens)
    report.finish()


def edges_variants(*, stock: bool) -> Iterator[Variant]:
    for edges in ("8", "64", "1000000", "1"):
        what = {"1000000": "one chunk", "1": "one token at a time"}.get(edges, f"chunks of {edges}")
        yield Variant(f"other edges: {what}", stock, edges)


def variants() -> Iterator[Variant]:
    info = blas.info()
    threads = info.threads if info else 1
    yield Variant("the same in another process")
    yield from edges_variants(stock=False)
    other = 2 if threads == 1 else 1
    yield Variant(f"BLAS with {other} threads instead of {threads}", env={"OPENBLAS_NUM_THREADS": str(other)})
    for kernel in KERNELS:
        if info is not None and kernel.lower() not in info.core.lower():
            yield Variant(f"BLAS kernel {kernel} instead of {info.core}", env={"OPENBLAS_CORETYPE": kernel})
    for beside in (1, 3, 7):
        yield Variant(f"{beside} other request{'s' * (beside > 1)} in the batch", beside=beside)


def compare(report: Report, name: str, folder: Path, tokens: int, work: Path) -> None:
    prompts = prompts_of(folder, tokens)
    for stock, what in ((False, "a request served alone"), (True, "stock passes cut on the grid")):
        table = report.table(
            f"{name}: largest differences from {what}", "variant", "KV of the prompt", "begins in",
            "logits after the prompt", "KV of the answer", "log-probabilities of the answer", "text",
        )  # fmt: skip
        base = run_child(folder, prompts, Variant("base", stock), work)
        for variant in edges_variants(stock=True) if stock else variants():
            found = run_child(folder, prompts, variant, work)
            table.add(variant.name, *differences(base, found, tokens))
            note(f"{name}: {variant.name}{' (stock)' if stock else ''}")


def prompts_of(folder: Path, tokens: int) -> list[list[int]]:
    """The prompt that is asked, and seven others of different lengths."""
    corpus = Corpus(folder)
    lengths = (tokens, *(tokens // 2 + 13 * n for n in range(1, 8)))
    text = corpus.text_tokens(corpus.prompt(sum(lengths)))
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    return [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def run_child(folder: Path, prompts: list[list[int]], variant: Variant, work: Path) -> State:
    given, state = work / "prompts.json", work / "state.npz"
    given.write_text(json.dumps(prompts[: 1 + variant.beside]))
    command = [sys.executable, __file__, "--folder", str(folder), "--edges", variant.edges]
    command += ["--prompts", str(given), "--state", str(state), *(["--stock"] if variant.stock else [])]
    subprocess.run(command, env=os.environ | dict(variant.env), check=True)
    with np.load(state) as saved:
        return State(saved["kv"], saved["logits"], saved["logprobs"], saved["answer"].tolist())


def differences(a: State, b: State, tokens: int) -> tuple[str, ...]:
    kv = np.abs(a.kv - b.kv)
    prompt = kv[:, :, : tokens - 1]
    layers = prompt.max(axis=(1, 2, 3))
    begins = next((i for i, value in enumerate(layers) if value), None)
    where = "-" if begins is None else f"layer {begins // 2}, {('keys', 'values')[begins % 2]}"
    same = next((i for i, (x, y) in enumerate(zip(a.answer, b.answer, strict=True)) if x != y), len(a.answer))
    text = "the same" if same == len(a.answer) else f"differs at token {same}"
    answer = kv[:, :, tokens - 1 : tokens - 1 + same]
    logprobs = np.abs(a.logprobs - b.logprobs)[:same]
    return (shown(prompt), where, shown(np.abs(a.logits - b.logits)), shown(answer), shown(logprobs), text)


def shown(values: FloatArray) -> str:
    most = float(values.max()) if values.size else 0.0
    return f"{most:.1e}" if most else "0"


# --- what it costs ------------------------------------------------------------------------------


def cost(report: Report, name: str, folder: Path, tokens: int) -> None:
    """Cold prefill in chunks of CHUNK, stock passes and such that may be cut anywhere, in turn in one process."""
    loaded = loader.load(folder)
    (prompt,) = prompts_of(folder, tokens)[:1]
    runners = {"stock": TextRunner(loaded, exact=False), "cut anywhere": TextRunner(loaded)}
    table = report.table(
        f"{name}: seconds of processor time to prefill {len(prompt):,} tokens in chunks of {CHUNK}",
        "passes", *map(str, range(1, COST_ROUNDS + 1)),
    )  # fmt: skip
    seconds: dict[str, list[float]] = {passes: [] for passes in runners}
    for _ in range(COST_ROUNDS):
        for passes, runner in runners.items():
            started = time.process_time()
            prefill(runner, prompt, str(CHUNK))
            seconds[passes].append(time.process_time() - started)
    for passes, found in seconds.items():
        table.add(passes, *(f"{value:.2f}" for value in found))
    ratio = min(seconds["cut anywhere"]) / min(seconds["stock"])
    table.add("least, to the least of stock", *[""] * (COST_ROUNDS - 1), f"{ratio:.2f}", targets=[
        # The products of a model as small as "tiny" are nearly all padded.
        Target(f"{name}: prefill that may be cut anywhere, to stock", round(ratio, 3), 1.03, "at most")
    ] if name != "tiny" else [])  # fmt: skip


# --- single operations --------------------------------------------------------------------------


def operations(report: Report, name: str, folder: Path) -> None:
    """What one row comes out as, alone and among others, in the first layer's operations."""
    table = report.table(
        f"{name}: one row of an operation, alone and beside others", "operation", "rows", "largest difference"
    )
    model = loader.load(folder).model
    layer = model.model.layers[0]
    width = layer.input_layernorm.weight.shape[0]
    x = mx.random.normal((1, 64, width), key=mx.random.key(0))
    for rows in (2, 8, 64):
        for what, work in (
            ("matrix product (query projection)", layer.self_attn.q_proj),
            ("RMS norm", layer.input_layernorm),
            ("MLP", layer.mlp),
        ):
            table.add(what, rows, shown(np.abs(np.array(work(x[:, :1])[:, 0] - work(x[:, :rows])[:, 0]))))
    for padding in (16, 200):
        table.add("attention of one query over 100 tokens", f"{padding} of padding", shown(padded_attention(padding)))


def padded_attention(padding: int) -> FloatArray:
    """The same attention with and without masked tokens in front, as a batch of unequal lengths has them."""
    q, k, v = (mx.random.normal((1, 2, n, 16), key=mx.random.key(i)) for i, n in enumerate((1, 100, 100)))
    alone = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25)
    front = mx.ones((1, 2, padding, 16))
    mask = mx.concatenate([mx.zeros(padding, dtype=mx.bool_), mx.ones(100, dtype=mx.bool_)]).reshape(1, 1, 1, -1)
    k, v = (mx.concatenate([front, array], axis=2) for array in (k, v))
    found: FloatArray = np.array(mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=mask) - alone)
    return np.abs(found)


def options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument(
        "--models", nargs="+", default=["tiny", "smollm2-135m"], help="tiny, or names (default %(default)s)"
    )
    made.add_argument("--tokens", type=int, default=300, help="of the prompt (default %(default)s)")
    made.add_argument("--prefill-tokens", type=int, default=2048, help="of the timed prefill (default %(default)s)")
    made.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # this and the next: one process of a variant
    made.add_argument("--edges", default="grid", help=argparse.SUPPRESS)
    made.add_argument("--stock", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--prompts", type=Path, help=argparse.SUPPRESS)
    made.add_argument("--state", type=Path, help=argparse.SUPPRESS)
    args: argparse.Namespace = made.parse_args()
    if args.quick:
        args.models, args.tokens, args.prefill_tokens = ["tiny"], 100, 200
    return args


if __name__ == "__main__":
    given = options()
    child(given) if given.state else main(given)
