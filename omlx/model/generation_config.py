"""A model's generation_config.json: sampling defaults, and the tokens that end a text."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from omlx.errors import ModelError
from omlx.model.json_file import read_object
from omlx.request import GREEDY_BELOW

log = logging.getLogger(__name__)

GENERATION_CONFIG = "generation_config.json"
_MOST_END_TOKENS = 1024


class _Range(NamedTuple):
    """Of a number; `above` excludes `low` itself."""

    low: float
    high: float
    whole: bool = False
    above: bool = False

    def contains(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if not self.low <= value <= self.high or (self.above and value == self.low):  # never of NaN
            return False
        return not self.whole or value == int(value)

    def __str__(self) -> str:
        return f"{'above' if self.above else 'from'} {self.low:g} {'up ' if self.above else ''}to {self.high:g}"


# The ranges are those of requests.
_RANGES = {
    "temperature": _Range(0, 2),
    "top_p": _Range(0, 1),
    "top_k": _Range(-1, 2**31 - 1, whole=True),
    "min_p": _Range(0, 1),
    "repetition_penalty": _Range(0, 10, above=True),
}

SAMPLING_FIELDS = tuple(_RANGES)
"""The fields of SamplingParams that a model may have defaults for."""


class GenerationConfig(NamedTuple):
    """`sampling` maps some of SAMPLING_FIELDS to values that SamplingParams takes."""

    sampling: Mapping[str, float]
    eos_token_ids: frozenset[int]


def read_generation_config(path: Path, name: str) -> GenerationConfig:
    """generation_config.json of the folder of model `name`; empty if there is none.

    What cannot be used is ignored, with one warning: the model works without it.
    """
    file = path / GENERATION_CONFIG
    if not os.path.lexists(file):
        return GenerationConfig({}, frozenset())
    try:
        content = read_object(file)
    except ModelError as error:
        log.warning("model %s: %s ignored: %s", name, GENERATION_CONFIG, error)
        return GenerationConfig({}, frozenset())
    ignored: list[str] = []
    sampling = _sampling(content, ignored)
    ends = end_tokens(content.get("eos_token_id"), ignored)
    if ignored:
        log.warning("model %s: values in %s ignored: %s", name, GENERATION_CONFIG, "; ".join(ignored))
    return GenerationConfig(sampling, ends)


def _sampling(content: Mapping[str, Any], ignored: list[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for field in SAMPLING_FIELDS:
        value = content.get(field)
        if value is None:
            continue
        try:
            found[field] = sampling_value(field, value)
        except ValueError as error:
            ignored.append(f"{field} is {error}")
    return found


def sampling_value(field: str, value: Any) -> float:
    """A value of one of SAMPLING_FIELDS as SamplingParams takes it. Raises ValueError: "5, not a number ..."."""
    allowed = _RANGES[field]
    if not allowed.contains(value):
        raise ValueError(f"{_shown(value)}, not {'a whole number' if allowed.whole else 'a number'} {allowed}")
    if allowed.whole:
        return max(int(value), 0)
    return 0.0 if field == "temperature" and value < GREEDY_BELOW else float(value)


def end_tokens(value: Any, ignored: list[str]) -> frozenset[int]:
    """The token ids in a value of `eos_token_id`: one, or a list of them. Adds a line to `ignored` for what is none."""
    listed = value if isinstance(value, list) else [] if value is None else [value]
    ids = [item for item in listed[:_MOST_END_TOKENS] if type(item) is int and 0 <= item < 1 << 31]
    if len(ids) < len(listed):
        wrong = next((item for item in listed if item not in ids), value)
        ignored.append(f"eos_token_id has {_shown(wrong)}, not a token id, or more than {_MOST_END_TOKENS:,} of them")
    return frozenset(ids)


def _shown(value: Any) -> str:
    """A value in a warning; of an object or a list, which may be large, only that it is one."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
