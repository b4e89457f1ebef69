"""Containers of request bodies: every list and object has a largest size, and its first error is the last.

Pydantic checks all members of a container and keeps an error for each, about 600 bytes: without this, a list of 20
million wrong members would take 15 GB. `tests/api/test_bounded.py` walks every body model and accepts no other
containers than these.
"""

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

T = TypeVar("T")


def at_most(size: int, least: int = 0) -> Any:
    """For a list or dict: its least and largest size, and no look beyond the first error."""
    return Field(min_length=least or None, max_length=size, fail_fast=True)


@dataclass(frozen=True, slots=True)
class Within:
    """Checks a value of any shape: how many members all its lists and objects have together, how many characters all
    its strings, and how deep it is nested. None stands for no limit of its own."""

    members: int
    characters: int | None
    levels: int

    def __call__(self, value: T) -> T:
        members = characters = 0
        layer: list[Any] = [value]
        for _ in range(self.levels + 1):
            below: list[Any] = []
            for item in layer:
                if isinstance(item, str):
                    characters += len(item)
                elif isinstance(item, dict | list):
                    members += len(item)
                    if members > self.members:
                        raise PydanticCustomError("too_large", f"has more than {self.members} values")
                    below += item.values() if isinstance(item, dict) else item
                    characters += sum(map(len, item)) if isinstance(item, dict) else 0
            if self.characters is not None and characters > self.characters:
                raise PydanticCustomError("too_large", f"has more than {self.characters} characters")
            if not below:
                return value
            layer = below
        raise PydanticCustomError("too_large", f"has more than {self.levels} levels")


def _deferred(value: T) -> T:
    return value


# A field that becomes one of another body, whose type checks it.
Deferred = Annotated[Any, AfterValidator(_deferred)]

# A value of any shape whose content hardly matters.
Small = Annotated[Any, AfterValidator(Within(members=1000, characters=100_000, levels=32))]

# Members and characters of a content part, such as an image; the body's limits bound how long its texts are.
_PART = Within(members=10_000, characters=None, levels=32)
_OPTIONS = Within(members=10_000, characters=1 << 20, levels=32)
_SCHEMA = Within(members=20_000, characters=1 << 20, levels=100)
_ARGUMENTS = Within(members=20_000, characters=None, levels=100)

MAX_PARTS = 10_000

Part = Annotated[dict[str, Any], at_most(_PART.members), AfterValidator(_PART)]
Parts = Annotated[list[Part], at_most(MAX_PARTS)]
Options = Annotated[dict[str, Any], at_most(_OPTIONS.members), AfterValidator(_OPTIONS)]
Schema = Annotated[dict[str, Any], at_most(_SCHEMA.members), AfterValidator(_SCHEMA)]
Arguments = Annotated[dict[str, Any], at_most(_ARGUMENTS.members), AfterValidator(_ARGUMENTS)]
