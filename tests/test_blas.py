"""The BLAS that MLX gets on Linux CPU. Fresh interpreters, because it is loaded once per process."""

import ctypes.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from omlx import blas

cpu_build_only = pytest.mark.skipif(not blas.is_cpu_build(), reason="only the CPU build of MLX on Linux needs a BLAS")


_SET_BY_PRELOAD = ("MLX_DISABLE_COMPILE", "OPENBLAS_NUM_THREADS")


def in_fresh_python(code: str, **environ: str) -> str:
    clean = {key: value for key, value in os.environ.items() if key not in _SET_BY_PRELOAD}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**clean, **environ}, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.strip()


def test_importing_omlx_imports_no_mlx_and_prints_nothing() -> None:
    assert in_fresh_python("import omlx, sys; print([m for m in sys.modules if m.startswith('mlx')])") == "[]"


@cpu_build_only
def test_openblas_is_loaded_and_compilation_is_off() -> None:
    show = "print(blas.info().name, blas.problem(), os.environ['MLX_DISABLE_COMPILE'])"
    assert in_fresh_python(f"import os; from omlx import blas; {show}") == "OpenBLAS None 1"


@cpu_build_only
def test_its_symbols_are_global_so_that_mlx_finds_them_first() -> None:
    code = "import omlx, ctypes; print(hasattr(ctypes.CDLL(None), 'cblas_sgemm'))"
    assert in_fresh_python(code) == "True"


@cpu_build_only
def test_the_users_own_settings_are_kept() -> None:
    code = "import omlx, os; from omlx import blas; print(blas.info().threads, os.environ['MLX_DISABLE_COMPILE'])"
    assert in_fresh_python(code, OPENBLAS_NUM_THREADS="1", MLX_DISABLE_COMPILE="yes") == "1 yes"


@cpu_build_only
def test_threads_leave_room_for_the_rest_of_the_process() -> None:
    code = "from omlx import blas; print(blas.info().threads == blas.default_threads())"
    assert in_fresh_python(code) == "True"


@cpu_build_only
def test_info_names_everything_that_changes_last_bits() -> None:
    code = "import dataclasses, json; from omlx import blas; print(json.dumps(dataclasses.asdict(blas.info())))"
    found = json.loads(in_fresh_python(code))
    assert found["config"].startswith("OpenBLAS 0.")
    assert found["core"]
    assert found["threads"] >= 1


@cpu_build_only
def test_mlx_imported_first_is_reported() -> None:
    code = "import mlx.core; from omlx import blas; print(blas.problem())"
    assert in_fresh_python(code) == "mlx was imported before omlx, so it may not use the fast BLAS"


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_state", blas._State())
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    monkeypatch.setattr(blas, "is_cpu_build", lambda: True)
    monkeypatch.setattr(blas.ctypes, "CDLL", _without_global_symbols(ctypes.CDLL))


def _without_global_symbols(real: type[ctypes.CDLL]) -> object:
    """CDLL in a process that has no BLAS among its global symbols, as before the preload."""
    return lambda name, mode=ctypes.DEFAULT_MODE: object() if name is None else real(name, mode=mode)


@pytest.mark.usefixtures("nothing_loaded")
def test_a_broken_library_is_remembered_and_not_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "libopenblas.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(blas, "_wheel_libraries", lambda: [broken])
    blas.preload()
    assert blas.info() is None
    assert str(broken) in str(blas.problem())


@pytest.mark.usefixtures("nothing_loaded")
def test_without_any_openblas_the_problem_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_wheel_libraries", list)
    blas.preload()
    assert blas.info() is None
    assert "pip install ngsolve-openblas" in str(blas.problem())
