"""docs/MODELS.md says of each family what it keeps; its table is computed here.

`OMLX_WRITE_TABLES=1 python -m pytest tests/families/test_models_table.py` writes it anew.
"""

import os
from collections import Counter
from pathlib import Path

from mlx_lm.sample_utils import greedy_sampler

from omlx.api.answer_format import answer_format
from omlx.cache.layer_layout import CacheLayout
from omlx.errors import ModelError
from omlx.model.decode_batch import DecodeBatch, DecodeOutput, DecodeRow
from omlx.model.runner import TextRunner
from tests.dict_store import DictStore
from tests.families import zoo
from tests.families.answers import FAMILIES
from tests.families.test_families import B, ask, cold, prompt
from tests.tiny import Bench

DOCUMENT = Path(__file__).parents[2] / "docs" / "MODELS.md"
HEAD = (
    "| family | its layers keep | stored | a match may end | equal to the last bit | decoded | `--kv-bits` "
    "| reasoning | tools |"
)
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
_LENGTHS = (1, B, B + 2, zoo.WINDOW + 2, 2 * zoo.WINDOW + B + 1)
_KEPT = {"full": "all tokens", "window": "a window", "chunk": "a chunk", "state": "a recurrent state"}


def test_the_table_in_the_document_is_what_the_models_do() -> None:
    rows = [row(family) for family in zoo.CONFIGS]
    text = DOCUMENT.read_text("utf-8")
    before, _, rest = text.partition(HEAD)
    after = rest[rest.index("\n\n") :]
    table = "\n".join([HEAD, "|---" * (HEAD.count("|") - 1) + "|", *rows])
    if os.environ.get("OMLX_WRITE_TABLES"):
        DOCUMENT.write_text(before + table + after, "utf-8")
    assert DOCUMENT.read_text("utf-8") == before + table + after


def row(family: str) -> str:
    runner = zoo.runner(family)
    layout = runner.layout
    assert isinstance(layout, CacheLayout)
    cells = [f"`{family}`", kept(layout), stored(runner), ends(runner), exact(family, runner), decoded(runner)]
    return "| " + " | ".join([*cells, quantised(family), *marks(family)]) + " |"


def marks(family: str) -> tuple[str, str]:
    """What surrounds reasoning, and what begins calls, in the answer that tests/families/answers.py has."""
    form = answer_format(FAMILIES[family].tokenizer(), "", TOOLS)
    begins = ", ".join(f"`{calls.start or 'to=functions.'}`" for calls in form.calls)
    thought = f"`{form.thought[0]}`" if form.thought else "none"
    return thought.replace("|", r"\|"), begins.replace("|", r"\|")


def kept(layout: CacheLayout) -> str:
    found = Counter(_KEPT[layer.kind.name] for layer in layout.layers)
    return "; ".join(sorted(found))


def stored(runner: TextRunner) -> str:
    """What a prompt of several blocks leaves in a store."""
    bench = Bench(runner, DictStore())
    ask(bench, prompt(5 * B + 3))
    layout, found = runner.layout, set()
    for meta, block in bench.store.blocks.values():
        if meta.token_count:
            found.add("1 tokens" if block.nbytes else "")
        else:
            found.add("3 states" if block.specs == layout.state_specs else "2 windows")
    return ", ".join(name[2:] for name in sorted(found) if name)


def ends(runner: TextRunner) -> str:
    """Where prompts part in the middle of a block, what is reused of the first one by the second?"""
    bench = Bench(runner, DictStore(), exact="off")
    text = prompt(4 * B)
    ask(bench, text)
    parted = text[: 2 * B + 5] + [(text[2 * B + 5] + 1) % zoo.EOS, 1, 2, 3]
    reused = ask(bench, parted).stats.cached_tokens
    return {2 * B + 5: "anywhere", 2 * B: "where a state was kept"}[reused]


def exact(family: str, runner: TextRunner) -> str:
    """Whether the first answer and the one from the cache have the bits of a cold run."""
    bench = Bench(runner, DictStore())
    for n in _LENGTHS:
        text = prompt(n, seed=n)
        answers = [bench.answer(ask(bench, text)) for _ in range(2)]
        if any(answer != cold(family, text) for answer in answers):
            return "no"
    return "yes"


def decoded(runner: TextRunner) -> str:
    batch = DecodeBatch(runner.decoder)
    for name in ("a", "b"):
        caches = runner.new_cache()
        runner.prefill([1, 2, 3], caches)
        batch.add(DecodeRow(name, 4, False, [1, 2, 3], caches, 8, greedy_sampler, [], frozenset()))
    assert [type(output) for _ in range(2) for output in batch.step()] == [DecodeOutput] * 2
    return {(2,): "in batches", (1, 1): "alone"}[tuple(batch.groups)]


def quantised(family: str) -> str:
    try:
        zoo.runner(family, 8, wide=True)
    except ModelError:
        return "no"
    return "yes"
