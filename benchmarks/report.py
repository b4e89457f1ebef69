"""Medians, targets and tables of the benchmarks, and the file that each run leaves."""

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from common import Server, note
from rich.console import Console
from rich.table import Table as RichTable

import omlx
from omlx import blas

BUSY_PERCENT = 10.0


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum, maximum and count of some measured values."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values), len(values))

    def cells(self, digits: int = 3) -> tuple[str, str, str]:
        """Median, spread and count as table cells."""
        return f"{self.median:.{digits}f}", f"{self.low:.{digits}f} to {self.high:.{digits}f}", str(self.count)


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that the project has to reach, and what was measured."""

    what: str
    value: float
    limit: float
    side: Literal["at least", "at most"]
    unit: str = ""

    @property
    def reached(self) -> bool:
        return self.value >= self.limit if self.side == "at least" else self.value <= self.limit

    @property
    def verdict(self) -> str:
        return "reached" if self.reached else "MISSED"

    def __str__(self) -> str:
        wanted = f"{self.side} {self.limit:g}{self.unit}"
        return f"{self.what}: {wanted}; measured {self.value:.3g}{self.unit}: {self.verdict}"


class Table:
    """Rows of text under a title; a row may be held against targets, which the caption spells out."""

    def __init__(self, title: str, columns: Sequence[str]) -> None:
        self.title = title
        self.targets: list[Target] = []
        self._columns = tuple(columns)
        self._rows: list[tuple[str, ...]] = []
        self._marks: list[str] = []

    def add(self, *cells: object, targets: Sequence[Target] = ()) -> None:
        assert len(cells) == len(self._columns), cells
        first = len(self.targets) + 1
        self.targets += targets
        self._rows.append(tuple(map(str, cells)))
        self._marks.append(", ".join(f"T{i} {target.verdict}" for i, target in enumerate(targets, first)) or "-")

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self._columns, "target") if self.targets else self._columns

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The rows, each with what became of its targets where the table has any."""
        if not self.targets:
            return self._rows
        return [(*row, mark) for row, mark in zip(self._rows, self._marks, strict=True)]

    @property
    def caption(self) -> str:
        lines = [f"T{i}: {target}." for i, target in enumerate(self.targets, 1)]
        return "\n".join(lines or ["No target applies to these rows."])

    def rich(self) -> RichTable:
        made = RichTable(*self.columns, title=self.title, caption=self.caption, caption_justify="left")
        for row in self.rows:
            made.add_row(*row)
        return made

    def markdown(self) -> str:
        lines = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"### {self.title}\n\n{body}\n\n" + "\n".join(f"- {line}" for line in self.caption.splitlines())

    def as_json(self) -> dict[str, Any]:
        targets = [dataclasses.asdict(target) | {"reached": target.reached} for target in self.targets]
        return {"title": self.title, "columns": self.columns, "rows": self.rows, "targets": targets}


class Report:
    """Tables and raw samples of one run; `finish` prints them and writes results/NAME.json and NAME.md."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name + ("-quick" if args.quick else "")
        self.args = args
        self.tables: list[Table] = []
        self.samples: dict[str, Any] = {}
        self.servers: dict[str, str] = {}
        self._began = time.monotonic()
        self._busy_percent = psutil.cpu_percent(interval=1.0)
        if self._busy_percent > BUSY_PERCENT:
            note(f"the machine is {self._busy_percent:.0f}% busy with other work: these figures will not be worth much")

    def table(self, title: str, *columns: str) -> Table:
        self.tables.append(Table(title, columns))
        return self.tables[-1]

    def used(self, *servers: Server) -> None:
        self.servers |= {server.name: server.shown() for server in servers}

    def finish(self) -> None:
        out = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
        for table in self.tables:
            out.print(table.rich())
        folder: Path = self.args.results
        folder.mkdir(parents=True, exist_ok=True)
        facts = environment() | {"other_load": f"{self._busy_percent:.0f}% of the CPU was in use before the start"}
        facts |= {"seconds": round(time.monotonic() - self._began)}
        (folder / f"{self.name}.json").write_text(json.dumps(self._as_json(facts), indent=1) + "\n")
        (folder / f"{self.name}.md").write_text(self._markdown(facts))
        note(f"written: {self.name}.json and {self.name}.md in {folder}")

    def _as_json(self, facts: dict[str, Any]) -> dict[str, Any]:
        settings = {key: value for key, value in vars(self.args).items() if key not in {"model", "results"}}
        tables = [table.as_json() for table in self.tables]
        return {
            "name": self.name,
            "environment": facts,
            "settings": settings,
            "servers": self.servers,
            "tables": tables,
            "samples": self.samples,
        }

    def _markdown(self, facts: dict[str, Any]) -> str:
        servers = [f"- {name}: `{command}`" for name, command in self.servers.items()]
        machine = [f"- {key}: {value}" for key, value in facts.items() if key != "command"]
        parts = [f"## {self.name}\n\n`{facts['command']}`", *(table.markdown() for table in self.tables)]
        return "\n\n".join([*parts, "\n".join(servers), "\n".join(machine)]) + "\n"


def environment() -> dict[str, Any]:
    """What a reader needs to judge the figures: command, machine, versions, BLAS, date."""
    versions = {name: _version(name) for name in ("mlx", "mlx-lm", "transformers")}
    library = blas.info()
    return {
        "command": _shown_command(),
        "date": time.strftime("%Y-%m-%d"),
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "omlx": omlx.__version__,
        **versions,
        "blas": f"{library.name} {library.core}, {library.threads} threads ({library.config})" if library else "none",
    }


def _shown_command() -> str:
    """The command line as typed in the repository root, without paths of this machine."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or "unknown"
