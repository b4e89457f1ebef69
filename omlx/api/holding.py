"""How many bytes clients have sent, or had fetched, for requests that are not answered yet, all together.

Each request is bounded by itself (its body, its images), and so is how many wait; this bounds what they come to.
"""

from contextvars import ContextVar
from threading import Lock

from omlx.errors import Overloaded
from omlx.sizes import format_size

FREE_BYTES = 64 << 10  # of each request, not counted: words find room when pictures have taken it all


class ByteBudget:
    """At most `limit` bytes of all `Held` together, unless a single one has them. For any thread."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.lock = Lock()


class Held:
    """What one request holds of a budget."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._bytes = 0

    def add(self, nbytes: int) -> None:
        """Raises Overloaded if there is no room for them; they count until `release` all the same."""
        with self._budget.lock:
            before, self._bytes = self._counted, self._bytes + nbytes
            self._budget.held += self._counted - before
            is_over = self._counted > before and self._budget.held > max(self._budget.limit, self._counted)
        if is_over:
            raise Overloaded(
                f"requests that are not answered yet hold {format_size(self._budget.limit)}; try again later"
            )

    @property
    def _counted(self) -> int:
        return max(0, self._bytes - FREE_BYTES)

    def release(self) -> None:
        with self._budget.lock:
            self._budget.held -= self._counted
            self._bytes = 0


current: ContextVar[Held | None] = ContextVar("what the request at hand holds", default=None)


def hold(nbytes: int) -> None:
    """Counts bytes that were fetched for the request at hand. Raises Overloaded."""
    held = current.get()
    if held is not None:
        held.add(nbytes)
