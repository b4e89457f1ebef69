"""Models for the tests: a tiny random one made on the spot, and the starter model if it is at hand."""

import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from omlx.metrics import RestoreTime
from omlx.model.folder import is_model, models_folder
from omlx.model.starter import STARTER
from omlx.testing import make_tiny_model

# Hypothesis: no time limits, which depend on what else the machine does; with CI set, the same examples in each run.
settings.register_profile(
    "omlx",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("omlx")


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """What one test has logged is no other's affair: a server that runs in this process sets the level."""
    logger = logging.getLogger("omlx")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture(autouse=True)
def stored_is_loaded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is slow just now the scheduler computes again what would be read slowly. That is the affair of
    its own tests (a module with MEASURES_RESTORES); all others would depend on what else the machine does."""
    if not getattr(request.module, "MEASURES_RESTORES", False):
        monkeypatch.setattr(RestoreTime, "LONG_S", math.inf)
        monkeypatch.setattr(RestoreTime, "FORGET_S", -1.0)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ordinary model folder with random weights; not to be changed."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def starter_model_dir() -> Path:
    """The starter model's folder, under OMLX_TEST_MODELS or OMLX_HOME (default ~/.omlx); not to be changed."""
    homes = (os.environ.get("OMLX_TEST_MODELS"), os.environ.get("OMLX_HOME"), "~/.omlx")
    for home in filter(None, homes):
        folder = models_folder(Path(home).expanduser()) / STARTER
        if is_model(folder):
            return folder
    pytest.skip(f"the starter model is not there; `omlx pull {STARTER}` fetches it")
