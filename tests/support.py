"""What tests of every folder share."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Generous: a wait ends with its condition, and a machine under load is slow. A test that fails may wait so long.
PATIENCE_S = 60.0


def wait_until(condition: Callable[[], T], timeout_s: float = PATIENCE_S) -> T:
    """Call `condition` until its result is true, and return that; an AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"the condition was not met within {timeout_s:g} s"
        time.sleep(0.01)
    return result
