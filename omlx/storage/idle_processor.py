"""Whether a second thread would help: where every processor has work, it only holds up the first."""

import os
from pathlib import Path

_LOAD = Path("/proc/loadavg")  # "0.52 0.40 0.31 2/1234 5678": two threads of 1234 run or want to


def has_idle_processor(load: Path = _LOAD) -> bool:
    """Whether fewer threads than processors want to run at this moment, the caller included; True if unknown.

    Takes 10 us: systems that do not say are taken for ones that have processors enough.
    """
    try:
        wanting = int(load.read_bytes().split()[3].partition(b"/")[0])
    except (OSError, ValueError, IndexError):
        return True
    return wanting < (os.cpu_count() or 1)
