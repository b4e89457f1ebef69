"""How many bytes clients have sent, or had fetched, for requests that are not answered yet, all together.

Each request is bounded by itself (its body, its images), and so is how many wait; this bounds what they come to.
"""

from collections import Counter
from contextvars import ContextVar
from threading import Lock

from omlx.errors import Overloaded
from omlx.sizes import format_size

FREE_BYTES = 64 << 10  # of each request, not counted: words find room when pictures have taken it all


class ByteBudget:
    """At most `limit` bytes of all `Held` together, unless a single one has them. For any thread.

    Where there are several `tenants` (API keys), one with no more than an equal part of the limit is let in all the
    same, since what others hold cannot be taken from them: together they hold twice the limit at most.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.tenants = 1
        self.held = 0
        self.held_by: Counter[str] = Counter()
        self.lock = Lock()


class Held:
    """What one request of a tenant holds of a budget."""

    def __init__(self, budget: ByteBudget, tenant: str = "") -> None:
        self._budget = budget
        self._tenant = tenant
        self._bytes = 0

    def add(self, nbytes: int) -> None:
        """Raises Overloaded if there is no room for them; they count until `release` all the same."""
        budget = self._budget
        with budget.lock:
            before, self._bytes = self._counted, self._bytes + nbytes
            self._count(self._counted - before)
            is_over = self._counted > before and budget.held > max(budget.limit, self._counted)
            has_share = budget.tenants > 1 and budget.held_by[self._tenant] <= budget.limit // budget.tenants
        if is_over and not has_share:
            raise Overloaded(
                f"requests that are not answered yet hold {format_size(self._budget.limit)}; try again later"
            )

    @property
    def _counted(self) -> int:
        return max(0, self._bytes - FREE_BYTES)

    def release(self) -> None:
        with self._budget.lock:
            self._count(-self._counted)
            self._bytes = 0

    def _count(self, nbytes: int) -> None:
        self._budget.held += nbytes
        self._budget.held_by[self._tenant] += nbytes
        if not self._budget.held_by[self._tenant]:
            del self._budget.held_by[self._tenant]


current: ContextVar[Held | None] = ContextVar("what the request at hand holds", default=None)


def hold(nbytes: int) -> None:
    """Counts bytes that were fetched for the request at hand. Raises Overloaded."""
    held = current.get()
    if held is not None:
        held.add(nbytes)
