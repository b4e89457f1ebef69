"""A fast BLAS for MLX on Linux CPU.

The Linux CPU wheel of MLX is linked to a reference BLAS of a few GFLOP/s. Its calls are resolved
in the process's global symbols first, so an OpenBLAS loaded with RTLD_GLOBAL before `mlx.core` is
imported takes them over. Nothing here imports MLX, and nothing here raises: a machine without a
fast BLAS serves slowly, and `omlx doctor` says why.
"""

import ctypes
import ctypes.util
import importlib.metadata
import importlib.util
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

_GFORTRAN = "libgfortran.so.5"
_CUDA_BUILDS = ("mlx-cuda", "mlx-cuda-12", "mlx-cuda-13")


@dataclass(frozen=True, slots=True)
class BlasInfo:
    """The BLAS that MLX calls: all four change the last bits of a product.

    `name` is "OpenBLAS", or "other" for a library that does not say; `config` and `core` are
    OpenBLAS's own description of its build and of the kernels chosen for this CPU ("" if unknown);
    `threads` is 0 if unknown.
    """

    name: str
    config: str
    core: str
    threads: int


@dataclass(slots=True)
class _State:
    library: ctypes.CDLL | None = None
    problem: str | None = None


_state = _State()


def preload() -> None:
    """Load OpenBLAS and switch MLX's run-time compilation off, on Linux with MLX's CPU build only.

    Compilation would call g++ at the first use of each fused kernel, for no gain on CPU. Never
    raises; `problem()` says afterwards what went wrong. Calling it again changes nothing.
    """
    if _state.library is not None or not is_cpu_build():
        return
    os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(default_threads()))
    try:
        _state.library = _load()
        _state.problem = None
    except Exception as error:  # broad: importing omlx must not fail for want of speed
        _state.problem = str(error) or type(error).__name__
        log.debug("no fast BLAS: %s", error)
        return
    if "mlx.core" in sys.modules:
        _state.problem = "mlx was imported before omlx, so it may not use the fast BLAS"


def default_threads() -> int:
    """Half of the cores that this process may use.

    OpenBLAS's threads wait for each other by spinning. When one of them loses its core to MLX's own
    threads, the event loop or another program, all of them wait. Measured on 2 cores with the starter
    model: on idle ones 2 threads are 1.0 to 1.5 times as fast as 1, on busy ones 3 to 20 times as slow.
    """
    return max(1, len(os.sched_getaffinity(0)) // 2)


def is_cpu_build() -> bool:
    """Whether this is Linux with the CPU build of MLX. Looks at installed packages only."""
    if sys.platform != "linux":
        return False
    return _installed("mlx-cpu") and not any(map(_installed, _CUDA_BUILDS))


def info() -> BlasInfo | None:
    """What `preload()` loaded; None where it loaded nothing (other platforms, or a failure)."""
    library = _state.library
    if library is None:
        return None
    if not hasattr(library, "openblas_get_config"):
        return BlasInfo("other", "", "", 0)
    return BlasInfo(
        "OpenBLAS",
        _text(library, "openblas_get_config"),
        _text(library, "openblas_get_corename"),
        int(library.openblas_get_num_threads()),
    )


def problem() -> str | None:
    """Why there is no fast BLAS, in one line; None if all is well or none is needed here."""
    return _state.problem


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _text(library: ctypes.CDLL, function: str) -> str:
    call = getattr(library, function)
    call.restype = ctypes.c_char_p
    answer = call()
    return answer.decode("ascii", "replace").strip() if isinstance(answer, bytes) else ""


def _load() -> ctypes.CDLL:
    """The library whose `cblas_sgemm` MLX will find. Raises OSError with every reason collected."""
    process = ctypes.CDLL(None)
    if hasattr(process, "cblas_sgemm"):  # the user preloaded one: it comes first in any case
        return process
    failures = []
    for path in _wheel_libraries():
        try:
            return _load_wheel_library(path)
        except OSError as error:
            failures.append(str(error))
    for name in filter(None, map(ctypes.util.find_library, ("openblas", "openblasp", "openblaso"))):
        try:
            return _load_global(name)
        except OSError as error:
            failures.append(str(error))
    raise OSError("; ".join(failures) or "no OpenBLAS found (pip install ngsolve-openblas)")


def _load_global(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    if not hasattr(library, "cblas_sgemm"):
        raise OSError(f"{path} has no cblas_sgemm")
    return library


def _wheel_libraries() -> list[Path]:
    """OpenBLAS inside the ngsolve-openblas wheel. Its package is not imported: it prints on failure."""
    spec = importlib.util.find_spec("ngsolve_openblas")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return sorted(path for folder in folders for path in Path(folder).glob("libopenblas*.so*"))


def _load_wheel_library(path: Path) -> ctypes.CDLL:
    """Load the wheel's OpenBLAS, lending it MLX's private libgfortran where the system has none."""
    try:
        return _load_global(str(path))
    except OSError as error:
        if _GFORTRAN not in str(error):
            raise
    _lend_gfortran()
    return _load_global(str(path))


def _lend_gfortran() -> None:
    """Load the libgfortran bundled with mlx-cpu under the name that OpenBLAS asks for.

    Wheels bundle it under a mangled name, and the dynamic linker matches names: so a copy in memory
    gets the ordinary name back.
    """
    folder = Path(str(importlib.metadata.distribution("mlx-cpu").locate_file("mlx_cpu.libs")))
    for quadmath in sorted(folder.glob("libquadmath*")):
        ctypes.CDLL(str(quadmath), mode=ctypes.RTLD_GLOBAL)
    bundled = sorted(folder.glob("libgfortran-*.so.5*"))
    if not bundled:
        raise OSError(f"{_GFORTRAN} is missing (install it, or a mlx-cpu that bundles it)")
    with _library_file(_renamed(bundled[0])) as path:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def _renamed(path: Path) -> bytes:
    """The file's bytes with its own name replaced by the ordinary one, at unchanged length."""
    mangled = path.name.encode() + b"\0"
    return path.read_bytes().replace(mangled, _GFORTRAN.encode().ljust(len(mangled), b"\0"))


@contextmanager
def _library_file(content: bytes) -> Iterator[str]:
    """A path from which `content` can be loaded as a library; gone again afterwards."""
    try:
        descriptor = os.memfd_create(_GFORTRAN)
    except OSError:  # kernels can forbid executable memory files
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, _GFORTRAN)
            path.write_bytes(content)
            yield str(path)
        return
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{descriptor}"
