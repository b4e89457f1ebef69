"""One model's whole cache stack: built, closed and answered for in one place. No request passes through it."""

import os
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from omlx.cache.factory import CacheConfig, CacheFactory
from omlx.cache.prefix_cache import CacheIdentity, PrefixCache
from omlx.cache.vision_feature_cache import VisionFeatureSSDCache, figures
from omlx.storage.block_ledger import FolderFigures
from omlx.storage.clearing import Cleared
from omlx.storage.disk_store import DEFAULT_QUEUE_BYTES, DiskStore
from omlx.storage.feature_file import FeatureKey, feature_model_name, served_model
from omlx.storage.folder import VISION_FOLDER, folder_name, model_of
from omlx.storage.hot_tier import HotTier
from omlx.storage.open_stores import open_store, release_store

_RELEASE_S = 10.0


class TieredCacheManager:
    """The hot tier (RAM), the cold tier (files) and the prefix cache of one model; thread-safe.

    For a model that takes pictures `vision_features` has what its encoder made of them, under the name
    `feature_model`; None for others.

    Args:
        max_kv_cache_memory: bytes. The bound of running requests' KV, and of the hot tier too if neither `config`
            nor `hot_tier` says otherwise.
        ssd_dir: the cache root of the cold tier; None keeps no files.
        config: the other settings of the cache; its `paged_ssd_cache_dir` is not looked at.
        model_name: names the folder under the root; must be one model's alone.
        identity: what the model's KV depends on; without it `prefix_cache` serves save_block and load_block only.
        num_layers: layers of the model.
        hot_tier: a hot tier to share with other models, and with it one budget.
        vision: whether the model takes pictures.

    Raises StoreLocked if another process works on `ssd_dir`, ValueError if both tiers are off. A running request's
    blocks are those in `paged_cache`'s table of it: they stay in the hot tier until it ends.
    """

    def __init__(
        self,
        max_kv_cache_memory: int,
        ssd_dir: Path | None,
        *,
        config: CacheConfig | None = None,
        model_name: str = "default",
        identity: CacheIdentity | None = None,
        num_layers: int = 0,
        hot_tier: HotTier | None = None,
        vision: bool = False,
    ) -> None:
        config = config or CacheConfig(hot_cache_max_size=max_kv_cache_memory)
        self.config = replace(config, paged_ssd_cache_dir=ssd_dir)
        self.max_kv_cache_memory = max_kv_cache_memory
        self.model_name = model_name
        self.hot_tier = hot_tier or HotTier(config.hot_cache_max_size)
        # In the exact modes blocks under other numerics are of no use; with "off" they are.
        numerics = identity.numerics if identity is not None and config.exact != "off" else None
        store = CacheFactory.create_paged_ssd_cache(self.config, model_name, self.hot_tier, numerics)
        if store is None:
            raise ValueError("a cache needs room in RAM or a folder for files")
        self.store = store
        self.paged_cache = CacheFactory.create_paged_cache(self.config, num_layers)
        self.prefix_cache: PrefixCache = CacheFactory.create_prefix_cache(
            self.config, None, self.paged_cache, store, identity
        )
        fingerprint = identity.fingerprint if identity is not None else b""
        self.feature_model = feature_model_name(model_name, fingerprint, numerics)
        self.vision_features = CacheFactory.create_vision_feature_cache(self.config) if vision else None

    def evict_blocks_to_cold(self, nbytes: int, *, wait_s: float = 10.0) -> int:
        """Frees `nbytes` of this model's blocks in the hot tier, or a little more; returns the bytes freed.

        The oldest go first. Blocks of running requests stay, and so do those that cannot be written. A block has its
        file before it goes, or is with the writer if that takes longer than `wait_s` in all; it can be read
        throughout. Without a cold tier it is lost.
        """
        self.prefix_cache.drop_idle_slabs()
        return self.store.evict_from_ram(nbytes, wait_s)

    def evict_features(self, nbytes: int) -> int:
        """Frees `nbytes` of features in RAM, or a little more; returns the bytes freed. Never waits.

        The least recently used go first. Those whose file cannot be queued now stay; without a cold tier they are
        lost.
        """
        return 0 if self.vision_features is None else self.vision_features.evict_from_ram(nbytes)

    def restore_block_from_cold(self, block_id: int, block_hash: bytes) -> bool:
        """Brings a block back into the hot tier; True if it is there now. Reads files, makes no MLX call.

        False, and a miss in the counters, if there is no such block or its file is gone or damaged: the caller
        computes it again. False too if the hot tier has no room, or if a running request knows another block as
        `block_id`.
        """
        known = self.paged_cache.block_hash(block_id)
        return known in (None, block_hash) and self.store.restore_block(block_hash)

    def stats(self) -> dict[str, Any]:
        """What is held now, and counters since the start; sizes are bytes.

        `kv_cache_memory` is what the hot tier holds of this model, `blocks_cold` and `cold_tokens` what has a file
        or is being written, whether it is in the hot tier as well or not. A hit is a block that was read, a miss one
        that was not there when it was needed; `restores` are blocks that went from files back into the hot tier.
        `expired` blocks were not used for too long. `bytes_written` is what the SSD had to take since the start,
        `unsaved_bytes` what only the hot tier has and will be written when it leaves (write policy "back").
        `features` are those of pictures (`FeatureFigures`), of a model that takes some.
        """
        s = self.store.stats()
        held = self.paged_cache.held()
        return {
            "kv_cache_memory": s.ram_bytes,
            "blocks_hot": s.blocks_ram,
            "blocks_cold": s.blocks_ssd,
            "cold_tokens": s.tokens_ssd,
            "hits": s.hits_ram + s.hits_ssd,
            "misses": s.misses,
            "restores": s.restores,
            "evictions": s.evictions_ram + s.evictions_ssd,
            "expired": s.expired_ram + s.expired_ssd,
            "bytes": {"ram": s.ram_bytes, "ssd": s.ssd_bytes},
            "hits_ram": s.hits_ram,
            "hits_ssd": s.hits_ssd,
            "evictions_ram": s.evictions_ram,
            "evictions_ssd": s.evictions_ssd,
            "expired_ram": s.expired_ram,
            "expired_ssd": s.expired_ssd,
            "saves": s.saves,
            "declined": s.declined,
            "damaged": s.damaged,
            "write_errors": s.write_errors,
            "dropped_writes": s.dropped_writes,
            "files_written": s.files_written,
            "bytes_written": s.bytes_written,
            "unsaved_bytes": s.unsaved_bytes,
            "requests_with_blocks": len(held),
            "blocks_in_use": sum(held.values()),
        } | self._feature_stats()

    def _feature_stats(self) -> dict[str, Any]:
        cache = self.vision_features
        return {} if cache is None else {"features": figures([cache], self.feature_model)._asdict()}

    def feature_tiers(self, keys: Collection[str]) -> list[Literal["ram", "ssd"] | None]:
        """Where the features with these keys of pictures are now, None for those that are not kept."""
        cache = self.vision_features
        return [cache.tier_of(key, self.feature_model) if cache else None for key in keys]

    def expire_ram(self) -> None:
        """Drops blocks and features in RAM that expired. To be called now and then: nothing else does it when idle."""
        self.store.expire_ram()
        if self.vision_features is not None:
            self.vision_features.expire()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until all blocks and features have their files. False if that took too long or failed."""
        features = self.vision_features is None or self.vision_features.flush(timeout_s)
        return self.store.flush(timeout_s) and features

    def close(self, timeout_s: float = 10.0) -> bool:
        """Writes what is queued and lets go of RAM and folder; calling it again is safe. False if some was lost."""
        deadline = time.monotonic() + timeout_s
        self.prefix_cache.close()
        # First, since the root has to know how many bytes of files it leaves.
        features = self.vision_features is None or self.vision_features.close(timeout_s)
        return self.store.close(max(0.1, deadline - time.monotonic())) and features


class Held(NamedTuple):
    """What a tier has of a model."""

    blocks: int
    tokens: int
    bytes: int


class Stored(NamedTuple):
    """Who holds how much: one model's blocks in both tiers. `last_used_ns`: nanoseconds since the epoch, or 0."""

    model: str
    loaded: bool
    ram: Held
    ssd: Held
    last_used_ns: int


def stored_by_model(managers: Collection[TieredCacheManager], disk: DiskStore | None) -> list[Stored]:
    """What each model holds, in the order of names; those too that are not loaded but have files under the root."""
    loaded = {folder_name(manager.model_name): manager for manager in managers}
    on_disk = {} if disk is None else disk.blocks.figures()
    return sorted(_stored(folder, loaded.get(folder), on_disk.get(folder)) for folder in loaded.keys() | on_disk.keys())


def _stored(folder: str, manager: TieredCacheManager | None, on_disk: FolderFigures | None) -> Stored:
    ssd = Held(0, 0, 0) if on_disk is None else Held(on_disk.blocks, on_disk.tokens, on_disk.bytes)
    used = 0 if on_disk is None else on_disk.last_used_ns
    if manager is None:
        return Stored(model_of(folder), False, Held(0, 0, 0), ssd, used)
    store = manager.store
    return Stored(manager.model_name, True, Held(*store.held_in_ram), ssd, max(used, store.last_used_ns))


def open_root(config: CacheConfig, *, wait_for_lock: bool = False) -> DiskStore | None:
    """Opens the cache root, as a model's stack does, to be held while none is loaded; None without an SSD tier.

    Limits and expiry work from now on. To be given back with `release_store`. Raises StoreLocked if another process
    works on the root, unless `wait_for_lock`: then the store takes over when that process ends.
    """
    root = config.paged_ssd_cache_dir
    if root is None or not config.ssd_enabled:
        return None
    return open_store(
        root, config.max_paged_ssd_cache_size, DEFAULT_QUEUE_BYTES, ttl_s=config.cache_ttl,
        wait_for_lock=wait_for_lock,
    )  # fmt: skip


def open_features_folder(config: CacheConfig) -> VisionFeatureSSDCache | None:
    """Holds the features folder of a root that is open, so that limits and expiry work; None if there is none yet."""
    root = config.paged_ssd_cache_dir
    if root is None or not config.ssd_enabled or not os.path.isdir(root / VISION_FOLDER):
        return None
    return CacheFactory.create_vision_feature_cache(config)


def clear_cache(
    config: CacheConfig,
    managers: Collection[TieredCacheManager],
    model_name: str | None,
    before_ns: int | None = None,
) -> Cleared:
    """Deletes the stored blocks and image features of a model, or of all: in the managers' tiers, and in files.

    Files of models that are not loaded as well. With `before_ns` (nanoseconds since the epoch) only those that were
    last used before then. Blocks of running requests stay. Waits until the files are removed. Raises StoreLocked if
    another process works on the cache root.
    """
    found: dict[tuple[str, bytes], int] = {}
    disk = open_root(config)
    try:
        if disk is not None:
            disk.raise_if_locked()  # before anything is deleted
        for manager in managers:
            if model_name in (None, manager.model_name):
                folder = folder_name(manager.model_name)
                found |= {(folder, block_hash): nbytes for block_hash, nbytes in manager.store.clear(before_ns).items()}
        if disk is not None:
            wanted = None if model_name is None else folder_name(model_name)
            found |= (
                disk.blocks.clear(wanted)
                if before_ns is None
                else disk.blocks.remove_unused(before_ns, "cleared", wanted)
            )
        images = _clear_features(config, managers, model_name, before_ns)
    finally:
        if disk is not None:
            release_store(disk, _RELEASE_S)
    return Cleared(len(found), sum(found.values()) + sum(images.values()), len(images))


def _clear_features(
    config: CacheConfig, managers: Collection[TieredCacheManager], model_name: str | None, before_ns: int | None
) -> dict[FeatureKey, int]:
    """Of the managers, and of models that are not loaded; the root is open."""

    def wanted(key: FeatureKey) -> bool:
        return model_name in (None, served_model(key.model_name))

    caches = [manager.vision_features for manager in managers if manager.vision_features is not None]
    files = open_features_folder(config)
    found: dict[FeatureKey, int] = {}
    for cache in [*caches, files] if files is not None else caches:
        found = cache.clear(wanted, before_ns) | found
    if files is not None:
        files.close(_RELEASE_S)
    return found
