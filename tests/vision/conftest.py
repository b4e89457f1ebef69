"""What the tests of vision models have in common; they need the extra `vision`."""

from collections.abc import Iterator

import mlx.core as mx
import pytest

from omlx.admission import StoredPrefixes


@pytest.fixture(autouse=True, scope="package")
def no_compiler() -> Iterator[None]:
    """The bits are the same, and no fused kernel has to be compiled for each of these models."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(autouse=True)
def what_is_stored_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever that costs: these models compute so fast that a busy disk would make them recompute."""
    monkeypatch.setattr(StoredPrefixes, "_compute_s", lambda *_: None)
