"""Embedding models for the tests: tiny random ones, and the real one if it is at hand."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from omlx.model.folder import is_model, models_folder
from omlx.model.starter import EMBEDDER
from omlx.testing import make_tiny_model
from tests.embeddings.serving import serving
from tests.embeddings.tiny import make_tiny_encoder


@pytest.fixture(scope="session")
def embedder_dir() -> Path:
    """The folder of all-minilm-l6-v2, under OMLX_TEST_MODELS or OMLX_HOME (default ~/.omlx); not to be changed."""
    for home in filter(None, (os.environ.get("OMLX_TEST_MODELS"), os.environ.get("OMLX_HOME"), "~/.omlx")):
        folder = models_folder(Path(home).expanduser()) / EMBEDDER
        if is_model(folder):
            return folder
    pytest.skip(f"the model is not there; `omlx pull {EMBEDDER}` fetches it")


@pytest.fixture(scope="session")
def tiny_encoder_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_encoder(tmp_path_factory.mktemp("encoders") / "vectors")


@pytest.fixture(scope="session")
def tiny_reranker_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_encoder(tmp_path_factory.mktemp("encoders") / "scores", "rerank")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    make_tiny_model(home / "models" / "chat")
    make_tiny_encoder(home / "models" / "vectors")
    make_tiny_encoder(home / "models" / "scores", "rerank")
    return home


@pytest.fixture(scope="module")
def address(home: Path) -> Iterator[str]:
    with serving(home) as (address, _):
        yield address
