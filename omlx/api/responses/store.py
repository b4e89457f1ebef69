"""Responses that are kept to be read again and to go on from: in memory, so many and so many bytes, per API key."""

import json
import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

from omlx.api.holding import hold
from omlx.api.openai import compact_json
from omlx.errors import BadRequest, NotFound
from omlx.fair_share import next_to_lose
from omlx.sizes import format_size

logger = logging.getLogger("omlx.responses")

MAX_RESPONSES = 2000
MAX_BYTES = 128 << 20

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Kept:
    """`data` is JSON of the response and of the input items that came with its request."""

    owner: bytes
    data: bytes
    previous: str | None
    items: tuple[str, ...]

    def read(self) -> tuple[dict[str, Any], list[Item]]:
        """Raises Overloaded: what is read counts like the body of the request that it is read for."""
        hold(len(self.data))
        found = json.loads(self.data)
        return found["response"], found["input"]


class ResponseStore:
    """Of one server, until it ends; for any thread. `owner` is whoever came with the same API key.

    To make room, the key that has most loses what it has not used for longest (`fair_share`). A response is used when
    it is read and when a conversation continues it, then with all turns before it.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self.bytes = 0
        self._lock = Lock()
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: dict[str, _Kept] = {}
        self._of_owner: dict[bytes, OrderedDict[str, None]] = {}  # least recently used first
        self._bytes_of: Counter[bytes] = Counter()
        self._of_item: dict[tuple[bytes, str], str] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, owner: bytes, response: dict[str, Any], given: list[Item]) -> None:
        """Keeps a finished response and the input items of its request. One larger than the whole store is not kept."""
        data = compact_json({"response": response, "input": given}).encode()
        if len(data) > self._max_bytes:
            logger.warning("a response is not stored: it has %s", format_size(len(data)))
            return
        items = tuple(item["id"] for item in (*given, *response["output"]) if "id" in item)
        name = response["id"]
        with self._lock:
            self._of_owner.setdefault(owner, OrderedDict())[name] = None
            self._bytes_of[owner] += len(data)
            self._kept[name] = _Kept(owner, data, response["previous_response_id"], items)
            self._of_item |= {(owner, item): name for item in items}
            self.bytes += len(data)
            while self.bytes > self._max_bytes:
                self._drop_one(self._bytes_of)
            while len(self._kept) > self._max_responses:
                self._drop_one({owner: len(names) for owner, names in self._of_owner.items()})

    def _drop_one(self, amounts: Mapping[bytes, int]) -> None:
        loser = next_to_lose(amounts, self._of_owner)
        assert loser is not None
        self._drop(next(iter(self._of_owner[loser])))

    def response(self, owner: bytes, name: str) -> dict[str, Any]:
        """Raises NotFound."""
        return self._find(owner, name).read()[0]

    def delete(self, owner: bytes, name: str) -> None:
        """Raises NotFound."""
        with self._lock:
            self._known(owner, name)
            self._drop(name)

    def given(self, owner: bytes, name: str) -> list[Item]:
        """What a response is the answer to: the turns before it, as far as they are still there, and its own input.

        Raises NotFound.
        """
        kept = self._find(owner, name)
        turns = [kept.read()[1]]
        if kept.previous is not None:
            turns += [turn for turn in self._turns_back(owner, kept.previous) if turn is not None]
        return [item for turn in reversed(turns) for item in turn]

    def conversation(self, owner: bytes, name: str) -> list[Item]:
        """All items up to the end of a response: what was said to the model in all turns, and what it answered.

        Raises BadRequest if one of the turns is not there.
        """
        turns = []
        for turn in self._turns_back(owner, name):
            if turn is None:
                raise BadRequest(
                    f"previous_response_id: Previous response with id {name!r} not found, or a turn before it is gone",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            turns.append(turn)
        return [item for turn in reversed(turns) for item in turn]

    def items(self, owner: bytes, ids: Iterable[str]) -> dict[str, Item]:
        """Those of the items that are in the owner's responses, each of which is read once: it may be large."""
        wanted = set(ids)
        found: dict[str, Item] = {}
        with self._lock:
            names = {item_id: self._of_item.get((owner, item_id)) for item_id in ids}
            kept = {name: self._known(owner, name) for name in names.values() if name is not None}
        for name, one in kept.items():
            response, given = one.read()
            for item in reversed([*given, *response["output"]]):
                if item.get("id") in wanted and names[item["id"]] == name:
                    found[item["id"]] = item
        return found

    def _turns_back(self, owner: bytes, name: str) -> Iterator[list[Item] | None]:
        """Input and output of a response and of those before it, latest first; None at the end for one that is gone."""
        upcoming: str | None = name
        while upcoming is not None:
            try:
                kept = self._find(owner, upcoming)
            except NotFound:
                yield None
                return
            response, given = kept.read()
            yield given + response["output"]
            upcoming = kept.previous

    def _find(self, owner: bytes, name: str) -> _Kept:
        with self._lock:
            return self._known(owner, name)

    def _known(self, owner: bytes, name: str) -> _Kept:
        kept = self._kept.get(name)
        if kept is None or kept.owner != owner:
            raise NotFound(f"Response with id {name!r} not found.", param="response_id", code=None)
        self._of_owner[owner].move_to_end(name)
        return kept

    def _drop(self, name: str) -> None:
        kept = self._kept.pop(name)
        self.bytes -= len(kept.data)
        self._bytes_of[kept.owner] -= len(kept.data)
        del self._of_owner[kept.owner][name]
        if not self._of_owner[kept.owner]:
            del self._of_owner[kept.owner], self._bytes_of[kept.owner]
        for item in kept.items:
            if self._of_item.get((kept.owner, item)) == name:
                del self._of_item[kept.owner, item]
