"""The seam between the prefix cache and the block store: `CacheManager` and its values."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import mlx.core as mx

from omlx.storage.bookkeeping import Gone
from omlx.storage.tensor_file import BlockBuffer, BlockMeta, TensorSpec

__all__ = ["BlockData", "BlockMeta", "CacheManager", "ChainPlace", "Gone", "ReadTarget", "StoreStats", "Tier"]

Tier = Literal["ram", "writing", "ssd"]
BlockData = BlockBuffer | Sequence[Sequence[mx.array]]


class ChainPlace(NamedTuple):
    """Where a block stands in what one request stores: bytes up to its end, and of all of it as far as that is known.

    `payload` is what counts in RAM, `file` what counts on disk.
    """

    payload: int
    file: int
    total_payload: int
    total_file: int


class ReadTarget(Protocol):
    """Where the bytes of a block go. Used by reader threads: no MLX in here.

    `specs` is what the block must hold, to the letter: a block with other tensors is a miss.
    """

    specs: tuple[TensorSpec, ...]

    def copy_from(self, block: BlockBuffer) -> None:
        """Takes what it wants out of a block in memory, which has these `specs`."""

    def pieces(self) -> list[memoryview] | None:
        """Writable bytes (1-D, format "B") in file order, together exactly the payload.

        None if the block has to be read as a whole first; then `copy_from` is called.
        """


@dataclass(slots=True)
class StoreStats:
    """What a store did since it was opened, and what it holds now. Sizes are bytes.

    `restores`: blocks from files that went back into RAM. `saves`: new blocks kept in any tier;
    `declined`: kept in no tier, because they or all blocks of their request exceed its
    limit. `damaged`: files that were not what they should be.
    `dropped_writes`: blocks that left RAM before their file could be queued. `expired_*`: blocks that
    were not used for too long. `files_written` and `bytes_written`: what was really written, failed tries
    apart. `unsaved_bytes`: what only RAM has and still is to be written. `ram_bytes` and `ssd_bytes` are
    this store's, `ram_total_bytes` and `ssd_total_bytes` those of everybody who shares the tier (for
    files: all that omlx keeps under the root).
    """

    hits_ram: int = 0
    hits_ssd: int = 0
    misses: int = 0
    saves: int = 0
    declined: int = 0
    restores: int = 0
    evictions_ram: int = 0
    evictions_ssd: int = 0
    expired_ram: int = 0
    expired_ssd: int = 0
    damaged: int = 0
    index_damaged: int = 0
    write_errors: int = 0
    dropped_writes: int = 0
    files_written: int = 0
    bytes_written: int = 0
    unsaved_bytes: int = 0
    blocks_ram: int = 0
    blocks_ssd: int = 0
    tokens_ssd: int = 0
    ram_bytes: int = 0
    ssd_bytes: int = 0
    ram_total_bytes: int = 0
    ssd_total_bytes: int = 0
    queue_bytes: int = 0


class CacheManager(ABC):
    """A store of blocks by hash. Every method may be called from any thread, and none waits for a disk
    except those that say so.

    What comes back is what was saved, to the last bit, or nothing: a store may forget any block that is
    not pinned, at any time, and never answers with a wrong one.
    """

    @abstractmethod
    def save_block(
        self,
        block_hash: bytes,
        data: BlockData,
        token_count: int,
        *,
        parent: bytes = b"",
        tokens: bytes = b"",
        start: int = 0,
        exact_tokens: int = 0,
        cuts: tuple[int, ...] = (),
        numerics: str = "",
        group: Hashable | None = None,
        replace: bool = False,
        place: ChainPlace | None = None,
    ) -> bool:
        """Keeps a block; it is readable when this returns. True if it is kept in some tier.

        `block_hash` has 1 to 64 bytes (else ValueError). `data` is one tuple of arrays a layer, or a buffer
        that nobody changes from now on. A block that is known already is left as it is, only put back into
        RAM and marked as used; `replace` drops the known one first. `group` (a request) leaves RAM together,
        oldest group first and its last blocks first; None is a group of its own. A `fair_share.Group` names its tenant:
        the one that has most in RAM makes room. A request that exceeds a tier's
        limit as a whole (`place`) gets half of the tier, for its first blocks: more would evict what others can
        use, and then be evicted itself.
        """

    @abstractmethod
    def load_block(self, block_hash: bytes) -> list[tuple[mx.array, ...]] | None:
        """The arrays as saved, evaluated; the block is marked as used and put back into RAM. Reads files."""

    @abstractmethod
    def read_block(self, block_hash: bytes, target: ReadTarget) -> Literal["ram", "ssd"] | None:
        """Copies a block into `target` and says where it was. Reads files, makes no MLX call.

        On None the target holds garbage. Neither marks the block as used nor puts it back into RAM.
        """

    def restore_block(self, block_hash: bytes) -> bool:
        """Puts a block back into RAM that is only in a file; False if it is not there then. Reads files, no MLX."""
        del block_hash
        return False

    @abstractmethod
    def tier_of(self, block_hash: bytes) -> Tier | None:
        """The fastest place where the block is now; "writing" is a queued write of a block that has left RAM."""

    @abstractmethod
    def get_meta(self, block_hash: bytes) -> BlockMeta | None:
        """What is known of a block. Its `tokens` may be None: they are on disk, and `tokens` reads them."""

    @abstractmethod
    def children(self, parent: bytes, like: bytes | None = None) -> list[BlockMeta]:
        """The known blocks that were saved with this parent, in any tier, with their tokens.

        May read the heads of files. Of many, those that share the longest prefixes with the packed tokens `like`
        and those that are a prefix of them, so that the time does not grow with their number; without `like` the
        latest of those in files.
        """

    @abstractmethod
    def touch(self, hashes: Sequence[bytes], tenant: str = "") -> None:
        """Marks the blocks of a tenant's request as used, the last one most recently. Unknown ones are passed over.

        In RAM they leave with this request from now on, not with the one that saved them, and count for its tenant.
        """

    @abstractmethod
    def pin(self, block_hash: bytes) -> None:
        """Keeps a block from being evicted until it was unpinned as often. It need not be known yet."""

    @abstractmethod
    def unpin(self, block_hash: bytes) -> None:
        """Raises ValueError if the block is not pinned."""

    @abstractmethod
    def delete_block(self, block_hash: bytes) -> bool:
        """Forgets a block in every tier, pinned or not. False if it was not known."""

    @abstractmethod
    def get_block_path(self, block_hash: bytes) -> Path | None:
        """Where the block's file is, or will be once its queued write is done; None if there is none."""

    @abstractmethod
    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until all blocks have their files, whenever they would have been written. False if that took too long
        or failed."""

    @abstractmethod
    def close(self, timeout_s: float = 10.0) -> bool:
        """Flushes and lets go of RAM and folder; calling it again is safe. False if blocks were lost."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """A copy of the counters."""

    @abstractmethod
    def check(self) -> list[str]:
        """Contradictions inside the store, and between its index and its files; for a store at rest. Reads files."""

    def get_metas(self, hashes: Sequence[bytes]) -> list[BlockMeta | None]:
        """`get_meta` of many blocks at once."""
        return [self.get_meta(block_hash) for block_hash in hashes]

    def tokens(self, block_hash: bytes) -> bytes | None:
        """The token ids of a block that is known, as uint32 little endian. May read the head of a file."""
        meta = self.get_meta(block_hash)
        return meta.tokens if meta is not None else None

    def all_children(self, parent: bytes) -> list[BlockMeta]:
        """`children`, however many there are. May read as many heads of files: not on the MLX thread."""
        return self.children(parent)

    def pin_all(self, hashes: Sequence[bytes]) -> None:
        """`pin` of many blocks."""
        for block_hash in hashes:
            self.pin(block_hash)

    def unpin_all(self, hashes: Sequence[bytes]) -> None:
        """`unpin` of many blocks."""
        for block_hash in hashes:
            self.unpin(block_hash)

    def declines(self, place: ChainPlace) -> bool:
        """Whether no tier takes a block there, because its request is larger than the cache."""
        del place
        return False

    def contains(self, block_hash: bytes) -> bool:
        return self.tier_of(block_hash) is not None

    def metas(self) -> list[BlockMeta]:
        """Every known block, in any tier and any order. A store that cannot list them has none to show."""
        return []

    def specs(self, block_hash: bytes) -> tuple[TensorSpec, ...] | None:
        """The tensors of a block, None if that is not known. May read the head of a file."""
        del block_hash
        return None

    def gone_after(self, parent: bytes) -> list[Gone]:
        """Blocks with this parent that were given up of late; to explain a miss, so none need be remembered."""
        del parent
        return []

    @property
    def keeps_ram(self) -> bool:
        """Whether there is a RAM tier: saving a block that is only on disk puts it there."""
        return True
