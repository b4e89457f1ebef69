"""Responses that are kept to be read again and to go on from: so many and so many bytes, per API key."""

import json
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

from omlx.api.holding import hold
from omlx.api.openai import compact_json
from omlx.api.responses.archive import Archive, Row
from omlx.errors import BadRequest, NotFound
from omlx.fair_share import next_to_lose
from omlx.sizes import format_size

logger = logging.getLogger("omlx.responses")

MAX_RESPONSES = 2000
MAX_BYTES = 128 << 20

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Kept:
    """`data` is JSON of the response and of the input items that came with its request; None: it is on disk alone."""

    row: Row
    data: bytes | None


class ResponseStore:
    """Of one server; for any thread. `owner` is whoever came with the same API key.

    With an `archive` they are on disk as well, and `open` brings back those of before. Those that were not used for
    `ttl_s` seconds (0: for ever) are deleted.

    To make room, the key that has most loses what it has not used for longest (`fair_share`). A response is used when
    it is read and when a conversation continues it, then with all turns before it.
    """

    def __init__(
        self,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        *,
        archive: Archive | None = None,
        ttl_s: int = 0,
    ) -> None:
        self.bytes = 0
        self._archive = archive
        self._ttl_ns = ttl_s * 1_000_000_000
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
        row = Row(response["id"], owner, response["previous_response_id"], items, len(data), time.time_ns())
        with self._lock:
            self._add(row, data)
            if self._archive is not None and row.name in self._kept:
                self._archive.put(row, data)

    def open(self) -> None:
        """Brings back what is on disk. Blocks."""
        for row in self._archive.rows() if self._archive is not None else ():
            with self._lock:
                if row.name not in self._kept:
                    self._add(row, None)

    def clear(self, before_ns: int | None = None) -> int:
        """Deletes all, or those last used before then (nanoseconds since the epoch); says how many. Blocks."""
        with self._lock:
            gone = [n for n, kept in self._kept.items() if before_ns is None or kept.row.used_ns < before_ns]
            for name in gone:
                self._drop(name)
        if self._archive is not None:
            self._archive.rows()  # when they are gone from the file
        return len(gone)

    def close(self) -> None:
        """Writes what waits to be written."""
        if self._archive is not None:
            self._archive.close()

    def _add(self, row: Row, data: bytes | None) -> None:
        self._of_owner.setdefault(row.owner, OrderedDict())[row.name] = None
        self._bytes_of[row.owner] += row.nbytes
        self._kept[row.name] = _Kept(row, data)
        self._of_item |= {(row.owner, item): row.name for item in row.items}
        self.bytes += row.nbytes
        self._expire()
        while self.bytes > self._max_bytes:
            self._drop_one(self._bytes_of)
        while len(self._kept) > self._max_responses:
            self._drop_one({owner: len(names) for owner, names in self._of_owner.items()})

    def _expire(self) -> None:
        if not self._ttl_ns:
            return
        before_ns = time.time_ns() - self._ttl_ns
        for names in list(self._of_owner.values()):
            for name in list(names):
                if self._kept[name].row.used_ns >= before_ns:
                    break
                self._drop(name)

    def _drop_one(self, amounts: Mapping[bytes, int]) -> None:
        loser = next_to_lose(amounts, self._of_owner)
        assert loser is not None
        self._drop(next(iter(self._of_owner[loser])))

    def _read(self, kept: _Kept) -> tuple[dict[str, Any], list[Item]]:
        """The response and its input. Raises NotFound if it is lost.

        Raises Overloaded: what is read counts like the body of the request that it is read for.
        """
        hold(kept.row.nbytes)
        data = kept.data
        if data is None and self._archive is not None:
            data = self._archive.read(kept.row.name)
        try:
            found = json.loads(data or b"")
            return found["response"], found["input"]
        except (ValueError, LookupError, TypeError):
            raise _not_found(kept.row.name) from None

    def response(self, owner: bytes, name: str) -> dict[str, Any]:
        """Raises NotFound."""
        return self._read(self._find(owner, name))[0]

    def delete(self, owner: bytes, name: str) -> None:
        """Deletes it, on disk as well. Raises NotFound, and Overloaded if it cannot be deleted on disk. Blocks."""
        self._find(owner, name)
        if self._archive is not None:
            self._archive.delete(name)
        with self._lock:
            if name in self._kept:
                self._drop(name)

    def given(self, owner: bytes, name: str) -> list[Item]:
        """What a response is the answer to: the turns before it, as far as they are still there, and its own input.

        Raises NotFound.
        """
        kept = self._find(owner, name)
        turns = [self._read(kept)[1]]
        if kept.row.previous is not None:
            turns += [turn for turn in self._turns_back(owner, kept.row.previous) if turn is not None]
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
            response, given = self._read(one)
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
                response, given = self._read(kept)
            except NotFound:
                yield None
                return
            yield given + response["output"]
            upcoming = kept.row.previous

    def _find(self, owner: bytes, name: str) -> _Kept:
        with self._lock:
            # Another server may have written it while this one ran beside it.
            if name not in self._kept and self._archive is not None and (row := self._archive.find(name)) is not None:
                self._add(row, None)
            return self._known(owner, name)

    def _known(self, owner: bytes, name: str) -> _Kept:
        self._expire()
        kept = self._kept.get(name)
        if kept is None or kept.row.owner != owner:
            raise _not_found(name)
        self._of_owner[owner].move_to_end(name)
        now_ns = time.time_ns()
        self._kept[name] = kept = _Kept(kept.row._replace(used_ns=now_ns), kept.data)
        if self._archive is not None:
            self._archive.touch(name, now_ns)
        return kept

    def _drop(self, name: str) -> None:
        row = self._kept.pop(name).row
        self.bytes -= row.nbytes
        self._bytes_of[row.owner] -= row.nbytes
        del self._of_owner[row.owner][name]
        if not self._of_owner[row.owner]:
            del self._of_owner[row.owner], self._bytes_of[row.owner]
        for item in row.items:
            if self._of_item.get((row.owner, item)) == name:
                del self._of_item[row.owner, item]
        if self._archive is not None:
            self._archive.discard(name)


def _not_found(name: str) -> NotFound:
    return NotFound(f"Response with id {name!r} not found.", param="response_id", code=None)
