"""Builds the cache stack from one configuration."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from omlx.cache.grid import ExactMode
from omlx.cache.interface import CacheManager
from omlx.cache.paged_cache import PagedCacheManager
from omlx.cache.paged_ssd_cache import PagedSSDCacheManager, WritePolicy
from omlx.cache.prefix_cache import SNAPSHOT_BYTES_PER_TOKEN, BlockAwarePrefixCache, CacheIdentity
from omlx.cache.vision_feature_cache import DEFAULT_MEMORY_BYTES, VisionFeatureSSDCache
from omlx.sizes import parse_duration, parse_size, quoted
from omlx.storage.folder import VISION_FOLDER, folder_name
from omlx.storage.hot_tier import HotTier

GB = 1024**3
_VISION_SHARE = 10  # features may take up a tenth of the SSD tier
_VISION_RAM_SHARE = 4  # and a quarter as many bytes of RAM as blocks
_VISION_ENTRIES = 10_000  # of RAM, which their bytes bound: small features cost more than their bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The cache's settings. Sizes are bytes; 0 turns a tier off.

    `hot_cache_max_size` bounds blocks kept in RAM, never running requests. Without
    `paged_ssd_cache_dir` there is no SSD tier. When the whole process takes up more than
    `max_process_memory`, blocks leave RAM; 0 sets no such limit. `cache_write_policy` "back" writes a
    block's file only when the block leaves RAM, and at close. What was not used for `cache_ttl` seconds
    is removed; 0 is never. Recurrent states are kept at so many places of a prompt that they add about
    `snapshot_bytes_per_token` to each of its tokens. A model that takes pictures keeps their features in
    at most `max_vision_memory` of RAM, and never more than a quarter of `hot_cache_max_size`.
    """

    block_size: int = 64
    hot_cache_max_size: int = 1 * GB
    paged_ssd_cache_dir: Path | None = None
    max_paged_ssd_cache_size: int = 100 * GB
    max_process_memory: int = 0
    cache_write_policy: WritePolicy = "through"
    cache_ttl: int = 0
    exact: ExactMode = "off"
    snapshot_bytes_per_token: int = SNAPSHOT_BYTES_PER_TOKEN
    max_vision_memory: int = DEFAULT_MEMORY_BYTES

    def __post_init__(self) -> None:
        """Sizes and durations may be text ("200GB", "7d"). Raises ValueError for what is none, as everywhere else."""
        for name in ("hot_cache_max_size", "max_paged_ssd_cache_size", "max_process_memory", "max_vision_memory"):
            object.__setattr__(self, name, parse_size(getattr(self, name)))
        if type(self.cache_ttl) is not int or self.cache_ttl < 0:
            object.__setattr__(self, "cache_ttl", parse_duration(self.cache_ttl, off=True))
        if self.cache_write_policy not in get_args(WritePolicy):
            raise ValueError(f"{quoted(self.cache_write_policy)} is no write policy (through or back)")

    @property
    def ssd_enabled(self) -> bool:
        return self.paged_ssd_cache_dir is not None and self.max_paged_ssd_cache_size > 0

    @property
    def enabled(self) -> bool:
        return self.ssd_enabled or self.hot_cache_max_size > 0


class CacheFactory:
    """The parts of a stack, each wired to the ones below."""

    @staticmethod
    def create_paged_cache(config: CacheConfig, num_layers: int) -> PagedCacheManager:
        return PagedCacheManager(config.block_size, num_layers)

    @staticmethod
    def create_paged_ssd_cache(
        config: CacheConfig, model_name: str, hot_tier: HotTier | None = None, numerics: str | None = None
    ) -> PagedSSDCacheManager | None:
        """The block store of one model, in its own folder under the cache root; None if both tiers are off.

        Several stores may share a `hot_tier`, and with it one budget of RAM. Only blocks under these `numerics`
        can be used (None: all); others are the first to go from disk.
        """
        if not config.enabled:
            return None
        root = config.paged_ssd_cache_dir if config.ssd_enabled else None
        return PagedSSDCacheManager(
            root / folder_name(model_name) if root else None,
            config.max_paged_ssd_cache_size if root else 0,
            config.hot_cache_max_size,
            hot_cache_only=root is None,
            root_dir=root,
            hot_tier=hot_tier,
            write_policy=config.cache_write_policy,
            ttl_s=config.cache_ttl,
            numerics=numerics,
        )

    @staticmethod
    def create_vision_feature_cache(config: CacheConfig) -> VisionFeatureSSDCache:
        """The features of one model's images in RAM, and those of all in a folder of their own under the cache root.

        Without a cache root in RAM only.
        To be opened after the block stores, by whom the root's lock is held: its files count towards their limit.
        """
        root = config.paged_ssd_cache_dir if config.ssd_enabled else None
        return VisionFeatureSSDCache(
            root / VISION_FOLDER if root else None,
            _VISION_ENTRIES,
            max_memory_bytes=min(config.max_vision_memory, config.hot_cache_max_size // _VISION_RAM_SHARE),
            max_disk_bytes=config.max_paged_ssd_cache_size // _VISION_SHARE,
            ttl_s=config.cache_ttl,
        )

    @staticmethod
    def create_prefix_cache(
        config: CacheConfig,
        model: Any,
        paged_cache: PagedCacheManager,
        paged_ssd_cache: CacheManager,
        identity: CacheIdentity | None = None,
    ) -> BlockAwarePrefixCache:
        """The prefix cache over a store. Without an `identity` it serves save_block and load_block only."""
        del model  # the documents pass it; what matters of a model is in its identity
        return BlockAwarePrefixCache(
            paged_cache, paged_ssd_cache, block_size=config.block_size, identity=identity, exact=config.exact,
            snapshot_bytes_per_token=config.snapshot_bytes_per_token,
        )  # fmt: skip
