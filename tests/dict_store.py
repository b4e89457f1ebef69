"""The block store's second implementation: a dictionary."""

from collections.abc import Sequence
from typing import Any, Literal

from omlx.arrays import pack, unpack
from omlx.cache.interface import BlockMeta, CacheManager, ReadTarget
from omlx.storage.tensor_file import BlockBuffer


class DictStore(CacheManager):
    """Keeps every block for ever. `lose(hash)` makes a block unreadable while its entry stays."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[BlockMeta, BlockBuffer]] = {}
        self.pinned: dict[bytes, int] = {}
        self.used: list[bytes] = []
        self.lost: set[bytes] = set()
        self.saves = 0

    def lose(self, block_hash: bytes) -> None:
        self.lost.add(block_hash)

    def save_block(self, block_hash: bytes, data: Any, token_count: int, **kinds: Any) -> bool:
        kinds.pop("group", None)
        kinds.pop("place", None)
        if not kinds.pop("replace", False) and block_hash in self.blocks:
            return True
        self.saves += 1
        self.lost.discard(block_hash)
        block = data if isinstance(data, BlockBuffer) else pack(data)
        meta = BlockMeta(block_hash=block_hash, token_count=token_count, file_size=block.nbytes, **kinds)
        self.blocks[block_hash] = meta, block
        return True

    def load_block(self, block_hash: bytes) -> Any:
        return unpack(self.blocks[block_hash][1]) if block_hash in self.blocks else None

    def read_block(self, block_hash: bytes, target: ReadTarget) -> Literal["ram", "ssd"] | None:
        if block_hash not in self.blocks or block_hash in self.lost:
            self.blocks.pop(block_hash, None)
            return None
        assert self.blocks[block_hash][1].specs == target.specs
        target.copy_from(self.blocks[block_hash][1])
        return "ram"

    def get_meta(self, block_hash: bytes) -> BlockMeta | None:
        return self.blocks[block_hash][0] if block_hash in self.blocks else None

    def contains(self, block_hash: bytes) -> bool:
        return block_hash in self.blocks

    def tier_of(self, block_hash: bytes) -> Literal["ram", "writing", "ssd"] | None:
        return "ram" if block_hash in self.blocks else None

    def children(self, parent: bytes, like: bytes | None = None) -> list[BlockMeta]:
        return [meta for meta, _ in self.blocks.values() if meta.parent == parent]

    def touch(self, hashes: Sequence[bytes], tenant: str = "") -> None:
        self.used += hashes

    def pin(self, block_hash: bytes) -> None:
        self.pinned[block_hash] = self.pinned.get(block_hash, 0) + 1

    def unpin(self, block_hash: bytes) -> None:
        self.pinned[block_hash] -= 1
        if not self.pinned[block_hash]:
            del self.pinned[block_hash]

    def delete_block(self, block_hash: bytes) -> bool:
        return self.blocks.pop(block_hash, None) is not None

    def get_block_path(self, block_hash: bytes) -> None:
        return None

    def flush(self, timeout_s: float | None = None) -> bool:
        return True

    def close(self, timeout_s: float = 10.0) -> None:
        pass

    def stats(self) -> Any:
        return None

    def check(self) -> list[str]:
        return []
