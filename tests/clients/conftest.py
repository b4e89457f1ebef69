from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.serving import ServerProcess, make_home


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("clients"))


@pytest.fixture(scope="package")
def server(home: Path) -> Iterator[ServerProcess]:
    """One for all clients."""
    with ServerProcess(home, ["--exact", "on"]) as made:
        yield made
