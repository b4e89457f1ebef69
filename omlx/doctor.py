"""What omlx runs on, measured, and what is slow or wrong about it."""

import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from omlx import __version__, blas
from omlx.model.folder import scan_models
from omlx.settings import Settings
from omlx.sizes import GB, existing_parent, format_duration, format_size, total_memory

TESTED_MLX_LM = "0.32.2"

_SIDE, _REPEATS = 1024, 5
_SLOW_GFLOPS = 20.0
_LITTLE_MEMORY = 2 * GB
_LITTLE_DISK = 5 * GB


class Row(NamedTuple):
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Report:
    """What was found; `warnings` are sentences that say what to do."""

    rows: tuple[Row, ...]
    warnings: tuple[str, ...]


def run(settings: Settings) -> int:
    """Print the report for these settings. 0 if all is well, 1 if there is a warning."""
    found = report(
        settings.paged_ssd_cache_dir,
        settings.paged_ssd_cache_max_size,
        _rules(settings),
        kv_bits=settings.kv_bits,
        home=settings.home,
    )
    render(found, Console())
    return 1 if found.warnings else 0


def _rules(settings: Settings) -> str:
    """When blocks are written and when they expire."""
    expire = f"unused blocks go after {format_duration(settings.cache_ttl)}" if settings.cache_ttl else "no expiry"
    return f"write {settings.cache_write_policy}, {expire}"


def report(
    cache_dir: Path | None,
    cache_limit: int | None = None,
    cache_rules: str = "",
    *,
    kv_bits: int | None = None,
    home: Path | None = None,
) -> Report:
    """Look and measure; takes under a second on a healthy machine.

    `cache_dir` is the folder of the SSD tier (None: off), which need not exist yet and is left as it
    is; `cache_limit` the bytes that it may take; `cache_rules` what else is to be said of it. `kv_bits`: what KV
    is quantised to, None for not at all. `home`: where models are, None looks at none.
    """
    gflops = measure_gflops()
    rows = (
        Row("omlx", f"{__version__}, Python {platform.python_version()}, {platform.platform(terse=True)}"),
        Row("device", _device()),
        Row("MLX", f"{_version('mlx')}, mlx-lm {_version('mlx-lm')}"),
        Row("BLAS", _blas()),
        Row("run-time compilation", "on" if _compiles() else "off"),
        Row("speed", f"{gflops:.0f} GFLOP/s (float32, {_SIDE} x {_SIDE})"),
        Row("memory", f"{format_size(_available_memory())} available of {format_size(total_memory())}"),
        Row("KV cache", f"quantised to {kv_bits} bits" if kv_bits else "as the model computes it"),
        *_cache_rows(cache_dir, cache_limit, cache_rules),
    )
    warnings = (
        *_speed_warnings(gflops),
        *_version_warnings(),
        *_room_warnings(cache_dir, cache_limit),
        *_model_warnings(home),
    )
    return Report(rows, warnings)


def render(found: Report, console: Console) -> None:
    """Print a report: a table, then one line for each warning."""
    table = Table(show_header=False)
    for row in found.rows:
        table.add_row(row.name, escape(row.value))
    console.print(table)
    for warning in found.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)
    if not found.warnings:
        console.print("[green]all well[/]")


def measure_gflops() -> float:
    """Billions of float32 operations a second in a square matrix product, the best of several runs."""
    a = mx.random.normal((_SIDE, _SIDE))
    mx.eval(a)
    best = float("inf")
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        mx.eval(a @ a)
        best = min(best, time.perf_counter() - begin)
    return 2 * _SIDE**3 / best / 1e9


def _device() -> str:
    info = mx.device_info()
    name = info.get("device_name") or platform.processor() or platform.machine()
    kind = "GPU" if mx.default_device() == mx.gpu else f"CPU, {os.cpu_count()} cores"
    return f"{name} ({kind})"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _blas() -> str:
    info = blas.info()
    if info is not None:
        return f"{info.name} {info.config.removeprefix(info.name).strip()}, {info.core}, {info.threads} threads"
    return "MLX's own"


def _compiles() -> bool:
    """MLX compiles unless the variable is set, to any value."""
    return "MLX_DISABLE_COMPILE" not in os.environ


def _available_memory() -> int:
    return min(int(psutil.virtual_memory().available), total_memory())


def _cache_rows(cache_dir: Path | None, limit: int | None, rules: str) -> Iterator[Row]:
    if cache_dir is None:
        yield Row("SSD cache", "off (--paged-ssd-cache-dir turns it on)")
        return
    yield Row("SSD cache", f"{cache_dir}" + (f", at most {format_size(limit)}" if limit is not None else ""))
    if rules:
        yield Row("SSD cache files", rules)
    yield Row("free disk there", format_size(_free_disk(cache_dir)))


def _free_disk(folder: Path) -> int:
    return shutil.disk_usage(existing_parent(folder)).free


def _speed_warnings(gflops: float) -> Iterator[str]:
    if blas.is_cpu_build():
        if (problem := blas.problem()) is not None:
            yield f"no fast BLAS: {problem}"
        if _compiles():
            yield "MLX compiles kernels while serving, which stalls requests on CPU: set MLX_DISABLE_COMPILE=1"
    if mx.default_device() == mx.cpu and gflops < _SLOW_GFLOPS:
        yield f"matrix products are slow ({gflops:.0f} GFLOP/s): no fast BLAS is in use, or the machine is busy"
    if sys.platform == "darwin" and mx.default_device() == mx.cpu:
        yield "the GPU is not used: MLX needs a Mac with Apple silicon and a native (arm64) Python"


def _version_warnings() -> Iterator[str]:
    if (found := _version("mlx-lm")) != TESTED_MLX_LM:
        yield f"mlx-lm {found} is installed; omlx is made for {TESTED_MLX_LM}, and its cache classes change often"


def _room_warnings(cache_dir: Path | None, limit: int | None) -> Iterator[str]:
    if (available := _available_memory()) < _LITTLE_MEMORY:
        yield f"only {format_size(available)} of memory are available"
    if cache_dir is None:
        return
    if (problem := _unwritable(cache_dir)) is not None:
        yield f"the SSD cache cannot be used: {problem}"
    free = _free_disk(cache_dir)
    if free < _LITTLE_DISK:
        yield f"only {format_size(free)} are free on the disk of {cache_dir}"
    elif limit is not None and free < limit:
        yield f"the SSD cache may grow to {format_size(limit)}, but only {format_size(free)} are free on its disk"


def _model_warnings(home: Path | None) -> Iterator[str]:
    if home is not None:
        yield from (f"model folder cannot be read: {line}" for line in scan_models(home).unreadable)


def _unwritable(folder: Path) -> str | None:
    """Why no file can be made in `folder` (or, where it does not exist yet, no folder above it), tried out."""
    above = (folder, *folder.parents)
    in_the_way = next((path for path in above if os.path.exists(path) and not os.path.isdir(path)), None)
    if in_the_way is not None:
        return f"{in_the_way} is not a folder"
    parent = existing_parent(folder)
    try:
        with tempfile.TemporaryFile(dir=parent):
            return None
    except OSError as error:
        return f"{parent}: {error.strerror}"
