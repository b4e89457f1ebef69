"""The models of one server: which there are, and an engine for each that is in use."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from omlx.cache.conversation import Forgotten
from omlx.cache.grid import PrefillGrid
from omlx.cache.layer_state import CacheLayout
from omlx.cache.prefix_cache import CacheIdentity
from omlx.cache.probe import PrefixProbe
from omlx.cache.tiered_manager import (
    TieredCacheManager,
    clear_cache,
    open_features_folder,
    open_root,
    stored_by_model,
)
from omlx.cache.vision_feature_cache import FeatureFigures, VisionFeatureSSDCache, figures
from omlx.engine.core import Engine, MLXThread, Streams
from omlx.engine.embedding import Embedders, EmbeddingEngine
from omlx.engine.loading import ModelLoader
from omlx.engine.vlm import VLMEngine
from omlx.errors import BadRequest, ModelError, NotFound, Overloaded
from omlx.memory_monitor import MemoryMonitor
from omlx.model import invariance
from omlx.model.folder import ModelInfo, find_model, folder_name, hashes_folder, scan_models
from omlx.model.generation_config import GENERATION_CONFIG
from omlx.model.loader import LoadedModel
from omlx.model.model_kind import WRITERS, ModelKind, ModelUse, model_use
from omlx.model.options import ModelOptions
from omlx.model.progress import folder_bytes
from omlx.model.runner import TextRunner, numerics
from omlx.model.steps import Steps
from omlx.model.vlm_loader import VisionModel, load_any
from omlx.model.vlm_runner import VLMRunner, vision_numerics
from omlx.request import ImageStart
from omlx.scheduler import Scheduler, SchedulerConfig
from omlx.sizes import format_size
from omlx.storage.clearing import Cleared
from omlx.storage.disk_store import DiskStore
from omlx.storage.expiry import look_period_s
from omlx.storage.hot_tier import HotTier
from omlx.storage.open_stores import release_store

log = logging.getLogger(__name__)

_READY_WITHIN_S = 5.0
_FORGET_WITHIN_S = 30.0
_THREAD_STOPS_WITHIN_S = 5.0
_CLOSES_WITHIN_S = 5.0

# Figures of single models that make sense as a sum; what is shared is measured once.
_SUMMED = (
    "hits", "misses", "restores", "evictions", "expired", "damaged", "files_written", "bytes_written", "unsaved_bytes",
    "blocks_hot", "requests_with_blocks", "blocks_in_use",
    "kv_bytes", "kv_tokens", "running_requests", "waiting_requests", "requests", "prompt_tokens",
    "cached_ram_tokens", "cached_ssd_tokens", "prefilled_tokens", "generated_tokens", "shared_prefills",
    "recomputed_tokens", "abandoned_restores",
    "vision_encoder_calls", "vision_encoder_s", "vision_feature_hits", "vision_feature_misses",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that can be asked for; `loaded` once its engine runs. `kind` and `note` are those of its ModelUse.
    `aliases`: more names that requests may use."""

    name: str
    path: Path
    size_bytes: int
    loaded: bool
    kind: ModelKind = "text"
    note: str = ""
    aliases: tuple[str, ...] = ()


@dataclass(slots=True)
class _Loaded:
    engine: Engine
    tiers: TieredCacheManager | None  # None for a model that is served without a cache


class EnginePool:
    """Engines by model name, loaded on first use, all on one MLX thread and over one RAM tier.

    `model` (a name or a folder) serves that one alone, with `adapter` (a folder) if given, and loads it at
    start; None serves every model under `home`. `model_options` maps names of models to what is said of each, which
    goes before `options`, those of all models; aliases in `options` are of `model`. Requests for a name that is not
    served get `default_model`, if it does what they ask for. Raises NotFound if that one is not served.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        home: Path,
        model: str | None = None,
        adapter: Path | None = None,
        *,
        options: ModelOptions | None = None,
        model_options: Mapping[str, ModelOptions] | None = None,
        default_model: str | None = None,
    ) -> None:
        self.config = config
        self._home = home
        options = options or ModelOptions()
        self._options = options if model is not None else options.model_copy(update={"aliases": ()})
        self._model_options = dict(model_options or {})
        self._unreadable: set[str] = set()
        self._only = find_model(model, home) if model is not None else None
        self._only_name = self._name(model) if model is not None else ""
        self._default_model: str | None = None
        self._adapter = adapter if model is not None else None
        self._hot = HotTier(config.hot_cache_max_size)
        self.memory = MemoryMonitor(self._hot, config.max_process_memory)
        self._thread = MLXThread(self._watch_memory)
        self._root: DiskStore | None = None
        self._expiring: asyncio.Task[None] | None = None
        self._features: VisionFeatureSSDCache | None = None
        self._loaded: dict[str, _Loaded] = {}
        self._loader = ModelLoader(self._thread)
        self._embedders = Embedders(self._thread, config, self._loader)
        if default_model is not None:
            self._default_model = self._find(default_model, "--default-model: ").name

    def _name(self, model: str) -> str:
        known = {info.path: info.name for info in self._scan()}
        path = find_model(model, self._home)
        return known.get(path) or folder_name(path.resolve())

    async def start(self) -> None:
        """Starts the MLX thread, opens the cache folder and loads the model that was named. Raises ModelError."""
        self._check_options()
        self._thread.start()
        await asyncio.to_thread(self._hold_root)
        if self.config.cache_ttl:
            self._expiring = asyncio.create_task(self._expire_ram())
        if self._only is None:
            return
        if self._use(self._only).kind in WRITERS:
            await self.get(self._only_name)
        else:
            await self.get_embedder(self._only_name)

    def _check_options(self) -> None:
        """Warns of options that do nothing: those of unknown models, and aliases that are names of other models."""
        names = {model.name for model in self.models()} if self._model_options else set()
        for name, options in self._model_options.items():
            if name not in names and self._only is None:
                log.warning("settings.json has options of %r, which is not a model here", name)
            for alias in names.intersection(options.aliases) - {name}:
                log.warning("alias %r of %s is ignored: a model has that name", alias, name)

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Aborts what runs, stores what it computed, writes the cache out; within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self._loader.cancel()
        if self._expiring is not None:
            self._expiring.cancel()
        await asyncio.to_thread(self._stop, deadline)

    def _stop(self, deadline: float) -> None:
        if not self._thread.stop(min(_THREAD_STOPS_WITHIN_S, max(0.1, (deadline - time.monotonic()) / 2))):
            log.warning("the MLX thread is still at work; its requests are dropped")
        written = True
        for loaded in self._loaded.values():
            if loaded.tiers is not None:
                self.memory.forget(loaded.tiers)
                written = loaded.tiers.close(max(0.1, deadline - time.monotonic() - 0.5)) and written
        self._loaded.clear()
        if self._features is not None:
            written = self._features.close(max(0.1, deadline - time.monotonic() - 0.2)) and written
            self._features = None
        if self._root is not None:
            written = release_store(self._root, max(0.1, deadline - time.monotonic() - 0.1)) and written
            self._root = None
        if not written:
            log.warning("the server had no time to write all that the cache was to keep: the rest is lost")

    def _hold_root(self) -> None:
        """Keeps the cache folder open, whether a model is loaded or not: its limits hold, and blocks expire."""
        if self._root is None:
            # Where another server holds the folder this one takes over when that one ends.
            self._root = open_root(self.config, wait_for_lock=True)
            self._features = open_features_folder(self.config)

    def models(self) -> list[ServedModel]:
        """What can be asked for, in name order."""
        if self._only is not None:
            found = [(self._only_name, self._only, folder_bytes(self._only))]
        else:
            found = [(info.name, info.path, info.size_bytes) for info in self._scan()]
        taken = {name for name, _, _ in found}
        return [
            ServedModel(
                name,
                path,
                size,
                name in self._loaded or name in self._embedders,
                *self._use(path),
                tuple(alias for alias in self._options_of(name).aliases if alias not in taken),
            )
            for name, path, size in found
        ]

    def _options_of(self, name: str) -> ModelOptions:
        own = self._model_options.get(name)
        return self._options if own is None else own.over(self._options)

    def _use(self, path: Path) -> ModelUse:
        return model_use(path, self._adapter is not None)

    def _scan(self) -> list[ModelInfo]:
        """The models under the home folder; warns once of each folder there that cannot be read."""
        scan = scan_models(self._home)
        for line in scan.unreadable:
            if line not in self._unreadable:
                log.warning("model folder cannot be read: %s", line)
        self._unreadable = set(scan.unreadable)
        return scan.models

    def _served(self, name: str, *, writes: bool) -> ServedModel:
        """The model that a request for `name` gets; `writes`: whether it asks for text. Raises NotFound."""
        try:
            return self._find(name)
        except NotFound:
            if self._default_model is None:
                raise
            served = self._find(self._default_model)
            if (served.kind in WRITERS) is not writes:
                raise
            return served

    def _find(self, name: str, prefix: str = "") -> ServedModel:
        """The model of this name or alias."""
        models = self.models()
        for model in models:
            if name == model.name or name in model.aliases:
                return model
        names = ", ".join(name for model in models for name in (*model.aliases, model.name)) or "none"
        raise NotFound(f"{prefix}no model {name!r} here; there is: {names}")

    async def get_embedder(self, name: str) -> EmbeddingEngine:
        """The engine of a model that gives embeddings or scores, loaded if it is not yet.

        Raises NotFound, ModelError, and BadRequest for a model that writes text.
        """
        if name in self._embedders:
            return self._embedders[name]
        served = self._served(name, writes=False)
        if served.name in self._embedders:
            return self._embedders[served.name]
        if served.kind in WRITERS:
            able = ", ".join(model.name for model in self.models() if model.kind not in WRITERS) or "none"
            message = f"model {name!r} writes text; models for embeddings and reranking here: {able}"
            raise BadRequest(message, param="model")
        if self._adapter is not None:
            raise ModelError(f"model {name!r} gives no text: --adapter-path is not for it")
        return await self._embedders.get(served.name, served.path)

    async def get(self, name: str) -> Engine:
        """The engine of a model, loaded if it is not yet.

        Raises NotFound, ModelError, and BadRequest for a model that writes no text.
        """
        if name in self._loaded:
            return self._loaded[name].engine
        served = self._served(name, writes=True)
        if served.kind not in WRITERS:
            use = "/v1/embeddings and /v1/rerank" if served.kind == "embedding" else "/v1/rerank"
            raise BadRequest(f"model {name!r} writes no text; it is for {use}", param="model")
        name = served.name
        if name not in self._loaded:
            folders = [served.path, *([self._adapter] if self._adapter else [])]
            keep = partial(self._loaded.__setitem__, name)
            await self._loader.load(name, folders, lambda: self._load(served), keep)
        return self._loaded[name].engine

    def loaded(self) -> list[Engine]:
        """The engines that run."""
        return [entry.engine for entry in self._loaded.values()]

    def loading(self) -> dict[str, str]:
        """The models that are being loaded, and how far each is ("" if that is not known)."""
        return self._loader.loading()

    async def ready(self) -> bool:
        """Whether the MLX thread answers."""
        if not self._thread.alive:
            return False
        try:
            await asyncio.wait_for(asyncio.wrap_future(self._thread.call(lambda: None)), _READY_WITHIN_S)
        except TimeoutError:
            return False
        return True

    async def _expire_ram(self) -> None:
        """Blocks and features without files have no writer thread that looks for those that expired."""
        while True:
            await asyncio.sleep(look_period_s(self.config.cache_ttl))
            for loaded in list(self._loaded.values()):
                if loaded.tiers is not None:
                    await asyncio.to_thread(loaded.tiers.expire_ram)

    def _watch_memory(self, idle: bool) -> None:
        """Between steps. What evicting blocks cannot mend pauses requests, one for each look at the process."""
        looks = self.memory.looks
        self.memory.check(now=idle)
        if self.memory.looks == looks:
            return
        schedulers = [loaded.engine.scheduler for loaded in list(self._loaded.values())]
        for scheduler in schedulers:
            scheduler.squeezed = self.memory.excess > 0
        if schedulers and self.memory.excess:
            max(schedulers, key=lambda scheduler: scheduler.kv_bytes).pause_newest()

    # ---- what operators see and do

    async def cache_figures(self) -> dict[str, Any]:
        """What caches and running requests hold: `total`, `models` by name for those that are loaded, and `stored`:
        who has how many blocks, models that are not loaded among them.

        Bytes unless a name says otherwise. Raises Overloaded if the MLX thread is busy for too long.
        """
        if not self._thread.alive:
            return self._figures()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._thread.call(self._figures)), _READY_WITHIN_S)
        except TimeoutError:
            raise Overloaded("the engine is busy loading a model or with a long step; try again later") from None

    def _figures(self) -> dict[str, Any]:
        """On the MLX thread, since it looks at what a step changes."""
        models = {name: _model_figures(loaded) for name, loaded in list(self._loaded.items())}
        total: dict[str, Any] = {key: sum(figures.get(key, 0) for figures in models.values()) for key in _SUMMED}
        stores = [loaded.tiers.store.stats() for loaded in list(self._loaded.values()) if loaded.tiers is not None]
        ssd = max((stats.ssd_total_bytes for stats in stores), default=self._root.blocks.bytes if self._root else 0)
        queue = max((stats.queue_bytes for stats in stores), default=0)
        total |= asdict(self.memory.figures()) | {"max_kv_cache_memory": self.config.max_kv_cache_memory}
        total["features"] = self._feature_figures()._asdict()
        total["bytes"] = {"ram": self._hot.bytes, "ssd": ssd, "queue": queue}
        return {"total": total, "models": models, "stored": self._stored(), "embedders": self._embedders.figures()}

    def _stored(self) -> list[dict[str, Any]]:
        managers = [loaded.tiers for loaded in list(self._loaded.values()) if loaded.tiers is not None]
        return [
            model._asdict() | {"ram": model.ram._asdict(), "ssd": model.ssd._asdict()}
            for model in stored_by_model(managers, self._root)
        ]

    def _feature_figures(self) -> FeatureFigures:
        tiers = [loaded.tiers for loaded in list(self._loaded.values()) if loaded.tiers is not None]
        caches = [self._features, *(manager.vision_features for manager in tiers)]
        return figures([cache for cache in caches if cache is not None])

    async def _step_ended(self) -> None:
        """Waits for the step that is under way: a request has its whole answer before its state is stored."""
        await self.ready()

    async def cache_probe(
        self, name: str, tokens: Sequence[int], salt: str = "", images: Sequence[ImageStart] = ()
    ) -> PrefixProbe | None:
        """What the cache has of a prompt (as it sees it) now, changing nothing; None for a model without a cache.

        Loads the model if it is not yet. Raises NotFound, ModelError.
        """
        name = (await self.get(name)).name
        await self._step_ended()
        tiers = self._loaded[name].tiers
        return None if tiers is None else await asyncio.to_thread(tiers.prefix_cache.probe, tokens, salt, images)

    async def feature_tiers(self, name: str, keys: Sequence[str]) -> list[Literal["ram", "ssd"] | None]:
        """Where the features with these keys of pictures are now, None for those that are not kept; changes nothing.

        Loads the model if it is not yet. Raises NotFound, ModelError.
        """
        name = (await self.get(name)).name
        tiers = self._loaded[name].tiers
        return [None] * len(keys) if tiers is None else await asyncio.to_thread(tiers.feature_tiers, keys)

    async def clear_cache(self, name: str | None = None, older_than_s: float | None = None) -> Cleared:
        """Deletes the stored blocks and image features of one model or of all, loaded or not.

        Blocks of running requests stay. With `older_than_s` only what was not used for so many seconds. A name without
        any gives zeros. Raises StoreLocked if another process works on the cache folder.
        """
        await self._step_ended()
        if name is not None:
            name = next((model.name for model in self.models() if name in model.aliases), name)
        managers = [loaded.tiers for loaded in self._loaded.values() if loaded.tiers is not None]
        before_ns = None if older_than_s is None else time.time_ns() - int(older_than_s * 1e9)
        return await asyncio.to_thread(clear_cache, self.config, managers, name, before_ns)

    async def forget_conversation(self, name: str, tokens: Sequence[int], salt: str = "") -> Forgotten:
        """Deletes what is stored of a prompt and of what continues it, but for what other conversations share.

        Loads the model if it is not yet. Raises NotFound, ModelError, and Overloaded if the MLX thread is busy for too
        long.
        """
        name = (await self.get(name)).name
        tiers = self._loaded[name].tiers
        if tiers is None:
            return Forgotten(0, 0, len(tokens), 0, None)
        await self._step_ended()
        cache = tiers.prefix_cache
        conversation = await asyncio.to_thread(cache.conversation, tokens, salt)
        try:  # between two steps: nobody matches or stores then
            work = asyncio.wrap_future(self._thread.call(lambda: cache.forget(conversation)))
            done = await asyncio.wait_for(work, _FORGET_WITHIN_S)
        except TimeoutError:
            raise Overloaded("the engine is busy loading a model or with a long step; try again later") from None
        await asyncio.to_thread(tiers.store.settle, _FORGET_WITHIN_S)
        return done

    def _load(self, served: ServedModel) -> Steps[_Loaded]:
        """Builds a model's whole stack, in steps; runs on the MLX thread."""
        log.info("model %s: loading from %s", served.name, served.path)
        started = time.monotonic()
        progress = self._loader.progress_of(served.name)
        model = yield from load_any(served.path, served.name, self._adapter, hashes_folder(self._home), progress)
        if isinstance(model, VisionModel):
            model = model._replace(loaded=self._with_options(model.loaded))
        else:
            model = self._with_options(model)
        vision, bits = isinstance(model, VisionModel), self.config.kv_bits
        # On a CPU such passes are the faster ones, too.
        exact = self.config.exact != "off" or mx.default_device() == mx.cpu
        if isinstance(model, VisionModel):
            runner: TextRunner = VLMRunner(model, bits, tried=False)
        else:
            runner = TextRunner(model, bits, exact=exact, tried=False)
        yield from runner.tries()
        config = self._config_for(runner)
        tiers = self._cache_stack(runner, vision, config)
        try:
            loaded = self._assembled(model, runner, tiers, config)
        except BaseException:
            if tiers is not None:
                tiers.close(_CLOSES_WITHIN_S)
            raise
        self._thread.attach(loaded.engine.scheduler)
        if tiers is not None:
            self.memory.watch(tiers)
        length, source = loaded.engine.context_length, loaded.engine.context_source
        log.info("model %s: context length %d tokens (%s)", served.name, length, source)
        log.info("model %s loaded in %.1f s", served.name, time.monotonic() - started)
        return loaded

    def _config_for(self, runner: TextRunner) -> SchedulerConfig:
        """The configuration, stricter for a model that needs it; says so, and if its rows are decoded one by one."""
        if runner.alone_because is not None:
            log.warning("model %s: its requests are decoded one by one: %s", runner.name, runner.alone_because)
        if runner.strict_because is None:
            return self.config
        log.warning("model %s: served with --exact strict: %s", runner.name, runner.strict_because)
        return replace(self.config, exact="strict")

    def _with_options(self, loaded: LoadedModel) -> LoadedModel:
        """The model with what options say instead of its files."""
        options = self._options_of(loaded.name)
        own = {} if options.generation_config == "none" else loaded.sampling_defaults
        sampling = {**own, **options.sampling}
        if sampling:
            values = ", ".join(
                f"{key} {value:g} ({'settings.json' if key in options.sampling else GENERATION_CONFIG})"
                for key, value in sampling.items()
            )
            log.info("model %s: sampling defaults: %s", loaded.name, values)
        loaded = replace(loaded, sampling_defaults=sampling, template_defaults=options.chat_template_kwargs)
        return loaded if options.max_model_len is None else self._with_length(loaded, options.max_model_len)

    def _with_length(self, loaded: LoadedModel, length: int) -> LoadedModel:
        """The model with a context length of `length` tokens, whatever its files say."""
        own = self._model_options.get(loaded.name)
        option = "--max-model-len" if own is None or own.max_model_len is None else "max_model_len in settings.json"
        said = f"{loaded.context_length} by {loaded.context_source}"
        if length > loaded.context_length:
            log.warning("model %s: %s %d is more than its own context length, %s", loaded.name, option, length, said)
        return replace(loaded, context_length=length, context_source=f"{option} instead of {said}")

    def _assembled(
        self,
        model: VisionModel | LoadedModel,
        runner: TextRunner,
        tiers: TieredCacheManager | None,
        config: SchedulerConfig,
    ) -> _Loaded:
        streams = Streams()
        scheduler = Scheduler(runner, config, tiers.prefix_cache if tiers else None, streams.emit)
        if not scheduler.most_tokens:
            limit = format_size(self.config.max_kv_cache_memory)
            raise ModelError(f"--max-kv-cache-memory {limit} has no room for a single request of {runner.name}")
        return _Loaded(self._engine(model, scheduler, streams, tiers), tiers)

    def _engine(
        self,
        model: VisionModel | LoadedModel,
        scheduler: Scheduler,
        streams: Streams,
        tiers: TieredCacheManager | None,
    ) -> Engine:
        if not isinstance(model, VisionModel):
            return Engine(model, scheduler, self._thread, streams)
        features = (tiers.vision_features, tiers.feature_model) if tiers is not None else (None, model.loaded.name)
        return VLMEngine(model, scheduler, self._thread, streams, *features)

    def _cache_stack(self, runner: TextRunner, vision: bool, config: SchedulerConfig) -> TieredCacheManager | None:
        layout = runner.layout
        if not isinstance(layout, CacheLayout):
            log.warning("model %s is served without a cache: %s", runner.name, layout.reason)
            return None
        cuts = "cut anywhere" if config.exact == "off" else f"grid {PrefillGrid(config.block_size)}"
        if runner.cut_anywhere:
            cuts = invariance.describe()
        named = (vision_numerics if vision else numerics)(cuts)
        identity = CacheIdentity(runner.fingerprint, layout, named, runner.cut_anywhere)
        return self._open_tiers(runner.name, identity, vision, config)

    def _open_tiers(
        self, name: str, identity: CacheIdentity, vision: bool, config: SchedulerConfig
    ) -> TieredCacheManager | None:
        self._hold_root()
        return self._tiers(config, name, identity, vision) if config.enabled else None

    def _tiers(self, config: SchedulerConfig, name: str, identity: CacheIdentity, vision: bool) -> TieredCacheManager:
        return TieredCacheManager(
            config.max_kv_cache_memory, config.paged_ssd_cache_dir, config=config, model_name=name,
            identity=identity, num_layers=len(identity.layout.layers), hot_tier=self._hot, vision=vision,
        )  # fmt: skip


def _model_figures(loaded: _Loaded) -> dict[str, Any]:
    scheduler = loaded.engine.scheduler
    requests = asdict(scheduler.stats) | {
        "running_requests": scheduler.running_requests,
        "waiting_requests": scheduler.waiting_requests,
    }
    held: dict[str, Any] = {
        "kv_bytes": scheduler.kv_bytes,
        "kv_tokens": scheduler.kv_tokens,
        "exact": scheduler.config.exact,
        "decoded_one_by_one": scheduler.decoded_one_by_one,
        "prefill_tokens_per_s": scheduler.prefill_speed,
        "restore_bytes_per_s": scheduler.restore_speeds,
    }
    held |= loaded.engine.figures
    return requests | held | {"cache": loaded.tiers is not None} | (loaded.tiers.stats() if loaded.tiers else {})
