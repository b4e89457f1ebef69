"""A server over real engines for the models under a home folder, and a way to talk to it."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from omlx.engine.pool import EnginePool
from omlx.server import create_app
from omlx.settings import Settings
from tests.api.serving import served


@contextlib.contextmanager
def serving(home: Path, **config: Any) -> Iterator[tuple[str, EnginePool]]:
    settings = Settings(home=home, max_kv_cache_memory="1GB", hot_cache_max_size="64MB")
    pool = EnginePool(dataclasses.replace(settings.scheduler_config(), **config), home)
    with served(create_app(pool, settings)) as address:
        yield address, pool


def post(address: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{address}/v1/{path}", json=body, timeout=60)
