"""Whose data makes room when a limit is reached: one rule for everything that API keys share.

The tenant that has most gives way. So a tenant with less than its fair share (the limit divided by the number of
tenants) never loses to one with more, and with one tenant only the order of use counts. A tenant is an API key: a
client's own `cache_salt` makes no other, or clients would get more by using many.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Item = TypeVar("Item")


class Group(NamedTuple):
    """Blocks of one request of a tenant."""

    request: object
    tenant: str = ""


def next_to_lose(bytes_of: Mapping[T, int], candidates: Iterable[T], adder: T | None = None) -> T | None:
    """The candidate that has most, the first of several; None if nobody has to give way.

    `adder` needs the room, and its bytes include what it adds: it takes none from those that have less than that.
    """
    most = max(candidates, key=lambda tenant: bytes_of.get(tenant, 0), default=None)
    if most is None or adder is None or bytes_of.get(most, 0) >= bytes_of.get(adder, 0):
        return most
    return None


def in_turn(
    queues: Mapping[T, Iterator[Item]], bytes_of: Mapping[T, int], adder: T | None = None
) -> Iterator[Item]:
    """The items of all tenants in the order in which they leave; a tenant's own queue has its oldest first.

    `bytes_of` is to be brought up to date when an item leaves, before the next is asked for. See `next_to_lose`.
    """
    left = dict(queues)
    while (tenant := next_to_lose(bytes_of, left, adder)) is not None:
        try:
            item = next(left[tenant])
        except StopIteration:
            del left[tenant]
        else:
            yield item
