from pathlib import Path

import pytest
from fastapi import FastAPI

from omlx.server import create_app
from omlx.settings import Settings
from tests.api.fakes import FakeEngine, FakePool


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path)


@pytest.fixture
def pool() -> FakePool:
    return FakePool()


@pytest.fixture
def engine(pool: FakePool) -> FakeEngine:
    return pool.engine


@pytest.fixture
def app(pool: FakePool, settings: Settings) -> FastAPI:
    return create_app(pool, settings)
