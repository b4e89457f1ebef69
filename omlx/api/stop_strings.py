"""Texts that end something, in text that comes in pieces whose borders mean nothing."""

from collections.abc import Collection


def first_stop(text: str, stops: Collection[str]) -> tuple[int, str | None]:
    """Where to end `text`, and why: before the stop string that is complete first (of two: that begins first).

    Without one (None): before what may be the beginning of one.
    """
    found = [(at + len(stop), at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if found:
        _, at, stop = min(found)
        return at, stop
    return len(text) - max((overlap(text, stop) for stop in stops), default=0), None


def overlap(text: str, marker: str) -> int:
    """Characters at the end of `text` that are a proper beginning of `marker`."""
    longest = min(len(marker) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
