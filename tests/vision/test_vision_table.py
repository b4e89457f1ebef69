"""docs/VISION.md says of each family what it does with pictures; its table is computed here.

`OMLX_WRITE_TABLES=1 python -m pytest tests/vision/test_vision_table.py` writes it anew.
"""

import os
from pathlib import Path

import mlx.core as mx

from omlx.model.vision_families import FAMILIES
from tests.dict_store import DictStore
from tests.families.test_models_table import kept
from tests.vision.models import TINY_VLMS, VisionBench, loaded, runner
from tests.vision.pictures import noise
from tests.vision.test_families import expected_logits, processed
from tests.vision.test_running import cold

DOCUMENT = Path(__file__).parents[2] / "docs" / "VISION.md"
HEAD = (
    "| `model_type` | positions of a picture | rope positions | its layers keep | logits as mlx-vlm's "
    "| equal to the last bit | decoded |"
)
SIZES = ((16, 16), (64, 64), (20, 90), (128, 48))
TURNS = [[noise(2, 64, 33), "What is this?"], ["Two: ", noise(1), noise(3, 20, 90), " - which is larger?"]]


def test_the_table_in_the_document_is_what_the_models_do() -> None:
    families = [family for family in TINY_VLMS if family in FAMILIES]
    assert sorted(families) == sorted(FAMILIES)
    text = DOCUMENT.read_text("utf-8")
    before, _, rest = text.partition(HEAD)
    after = rest[rest.index("\n\n") :]
    table = "\n".join([HEAD, "|---" * (HEAD.count("|") - 1) + "|", *map(row, families)])
    if os.environ.get("OMLX_WRITE_TABLES"):
        DOCUMENT.write_text(before + table + after, "utf-8")
    assert DOCUMENT.read_text("utf-8") == before + table + after


def row(family: str) -> str:
    cells = [f"`{family}`", positions(family), rope(family), kept(runner(family).layout)]
    return "| " + " | ".join([*cells, close(family), exact(family), decoded(family)]) + " |"


def positions(family: str) -> str:
    counts = [loaded(family).family.layout(size).positions for size in SIZES]
    return "as many for any size" if len(set(counts)) == 1 else "by its size"


def rope(family: str) -> str:
    bench = VisionBench(family, DictStore())
    return "along rows and columns" if bench.show(TURNS[0]).vision.rope_delta else "like tokens"


def close(family: str) -> str:
    """Within 1e-4 at the end of both prompts."""
    bench = VisionBench(family, DictStore())
    for turn in TURNS:
        logits = expected_logits(family, processed(family, turn))
        request = bench.see(turn, max_tokens=1, top_logprobs=1)
        [(token, logprob)] = bench.outputs[request.request_id][0].top_logprobs
        if abs(logprob - (logits - mx.logsumexp(logits))[token].item()) > 1e-4:
            return "no"
    return "yes"


def exact(family: str) -> str:
    bench = VisionBench(family, DictStore())
    answers = [bench.answer(bench.see(turn)) for _ in range(2) for turn in TURNS]
    return "yes" if answers == [cold(family, turn) for turn in TURNS] * 2 else "no"


def decoded(family: str) -> str:
    """Two rows at once: how many forward passes a step takes."""
    bench = VisionBench(family, DictStore())
    for turn in TURNS:
        bench.show(turn, max_tokens=20)
    groups: tuple[int, ...] = ()
    while bench.scheduler.has_work:
        bench.scheduler.step()
        groups = max(groups, tuple(bench.scheduler._batch.groups), key=sum)
    return {(2,): "in batches", (1, 1): "alone"}[groups]
