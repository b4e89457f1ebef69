"""Pictures: what is kept of them, and how fast it is kept and read back.

    python benchmarks/vision.py [--quick] [--parts features,model] [--reps 61]

features  the features of one picture, 10 MB of float32 and of bfloat16, put and read back from files in the page cache,
          each beside the raw copy or read
model     questions about pictures to a server with a random model of SmolVLM's size: the first, the second from RAM and
          after a restart, each beside a question about a text of as many tokens, of which as many are cached

Raw and ours, picture and text take turns, so what else the machine does meets both.
"""

import argparse
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from common import BenchmarkError, note, parser, run
from report import Report, Spread, Table, Target
from storage import in_turn, read_all, seconds, share, touched
from vision_model import model

from omlx.cache.vision_feature_cache import VisionFeatureSSDCache
from omlx.storage.feature_file import FeatureKey, feature_name

MB = 1e6
MODEL = "bench-0123456789abcdef"
PICTURES = 4  # in turn, so that no file is read twice in a row
COLUMNS = ("features", "what", "MB", "median ms", "min to max", "runs", "of raw")


# ---- features


class Features:
    """Some pictures' features in files, and what plain calls need to read and copy as much."""

    def __init__(self, folder: Path, nbytes: int, dtype: mx.Dtype) -> None:
        self.folder = folder
        self.values = [mx.random.normal((nbytes // dtype.size // 1000, 1000)).astype(dtype) for _ in range(PICTURES)]
        mx.eval(self.values)
        self.nbytes = self.values[0].nbytes
        self._turn = 0

    def cache(self, entries: int) -> VisionFeatureSSDCache:
        """One with all files, and so many entries in RAM."""
        cache = VisionFeatureSSDCache(self.folder, entries)
        for number, value in enumerate(self.values):
            cache.put(f"h{number}", MODEL, value)
        if not cache.flush(60.0):
            raise BenchmarkError("the features could not be written")
        return cache

    def path(self, number: int) -> Path:
        return self.folder / feature_name(FeatureKey(f"h{number}", MODEL))

    def next(self) -> int:
        self._turn += 1
        return self._turn % PICTURES

    def read(self, cache: VisionFeatureSSDCache, number: int, *, check: bool = False) -> float:
        """Seconds of a `get` that reads a file. Raises BenchmarkError if it did not, or gave other values."""
        before = cache.stats.disk_loads
        found: list[mx.array | None] = []
        taken = seconds(lambda: found.append(cache.get(f"h{number}", MODEL)))
        if found[0] is None or cache.stats.disk_loads != before + 1:
            raise BenchmarkError("the features did not come from their file")
        value = self.values[number]
        if check and not (found[0].dtype == value.dtype and mx.array_equal(found[0], value)):
            raise BenchmarkError("what was read is not what was put")
        return taken


async def features(report: Report, args: argparse.Namespace, work: Path) -> None:
    """put and get of large features."""
    reading = report.table("read a picture's features from a file in the page cache", *COLUMNS)
    keeping = report.table("put a picture's features, with 2 of 4 in RAM", *COLUMNS)
    for dtype in (mx.float32, mx.bfloat16):
        bench = Features(work / "features", args.feature_bytes, dtype)
        name = f"{str(dtype).rpartition('.')[2]}, {bench.nbytes / MB:.0f} MB"
        note(name)
        found = read_times(bench, args.reps)
        report.samples[f"get, {name}"] = found
        read_rows(reading, name, bench.nbytes, found)
        found = put_times(bench, args.reps)
        report.samples[f"put, {name}"] = found
        put_rows(keeping, name, bench.nbytes, found)
        shutil.rmtree(bench.folder)


def read_times(bench: Features, reps: int) -> dict[str, list[float]]:
    """One reader after the other reads the same file. The plain ones leave the checksum alone."""
    without, full = bench.cache(0), bench.cache(2)
    buffer = memoryview(touched(bench.path(0).stat().st_size))
    turns = iter(range(10**9))

    def each(read: Callable[[int], float]) -> Callable[[], float]:
        return lambda: read(next(turns) // 4 % PICTURES)

    def fresh(number: int) -> float:
        return seconds(lambda: read_all([bench.path(number)], memoryview(np.empty(buffer.nbytes, np.uint8))))

    variants = {
        "plain": each(lambda number: seconds(lambda: read_all([bench.path(number)], buffer))),
        "fresh": each(fresh),
        "ours": each(lambda number: bench.read(without, number)),
        "ours, RAM full": each(lambda number: bench.read(full, number)),
    }
    try:
        for number in range(PICTURES):
            for cache in (without, full):
                bench.read(cache, number, check=True)
        return in_turn(variants, reps)
    finally:
        without.close()
        full.close()


def read_rows(table: Table, name: str, nbytes: int, found: dict[str, list[float]]) -> None:
    add(table, name, "preadv, 1 thread, one touched buffer", nbytes, found["plain"], "100%")
    add(table, name, "preadv, 1 thread, fresh memory", nbytes, found["fresh"], f"{share(*pair(found, 'fresh')):.0f}%")
    for what, how in (("ours", "no RAM tier"), ("ours, RAM full", "each pushes another out of RAM")):
        ratio = share(*pair(found, what))
        target = Target(f"get, {name}, {how}", ratio, 80, "at least", "% of preadv")
        add(table, name, f"get, checked, 2 threads, {how}", nbytes, found[what], f"{ratio:.0f}%", targets=[target])


def pair(found: dict[str, list[float]], what: str) -> tuple[list[float], list[float]]:
    return found["plain"], found[what]


def put_times(bench: Features, reps: int) -> dict[str, list[float]]:
    """Each put finds the writer at rest, as it is while an encoder runs."""
    cache = bench.cache(2)
    source, target = touched(bench.nbytes), touched(bench.nbytes)

    def put() -> float:
        number = bench.next()
        taken = seconds(lambda: cache.put(f"h{number}", MODEL, bench.values[number]))
        cache.flush(60.0)
        return taken

    try:
        return in_turn({"memcpy": lambda: seconds(lambda: np.copyto(target, source)), "ours": put}, reps)
    finally:
        cache.close()


def put_rows(table: Table, name: str, nbytes: int, found: dict[str, list[float]]) -> None:
    raw, ours = found["memcpy"], found["ours"]
    above = 1000 * Spread.of([b - a for a, b in zip(raw, ours, strict=True)]).median
    add(table, name, "memcpy, touched buffers", nbytes, raw, "100%")
    target = Target(f"put, {name}, above its memcpy", above, 1.0, "at most", " ms")
    add(table, name, "put", nbytes, ours, f"{share(raw, ours):.0f}%", targets=[target])


def add(
    table: Table, name: str, what: str, nbytes: int, each: Sequence[float], ratio: str, targets: Sequence[Target] = ()
) -> None:
    cells = Spread.of([1000 * value for value in each]).cells(2)
    table.add(name, what, f"{nbytes / MB:.0f}", *cells, ratio, targets=targets)


# ---- the program

PARTS = {"features": features, "model": model}


async def main(args: argparse.Namespace, work: Path) -> None:
    report = Report("vision", args)
    for name, part in PARTS.items():
        if name in args.parts:
            await part(report, args, work)
    report.finish()


def options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--parts", type=_parts, default=tuple(PARTS), help="which, with commas between (default all)")
    made.add_argument("--reps", type=int, default=61)
    made.add_argument("--feature-bytes", type=int, default=10_000_000, help="of one picture's features")
    made.add_argument("--tiles", type=int, default=1, help="tiles of 512 pixels along a side that pictures are seen as")
    made.add_argument("--pictures", type=int, default=3, help="how many the encoder gets to see")
    made.add_argument("--questions", type=int, default=15, help="second questions about them, from RAM")
    made.add_argument("--restarts", type=int, default=5, help="and after a restart of the server")
    args: argparse.Namespace = made.parse_args()
    if args.quick:
        args.reps, args.pictures, args.questions, args.restarts = 3, 1, 2, 1
    return args


def _parts(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(PARTS):
        raise argparse.ArgumentTypeError(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return names


if __name__ == "__main__":
    run(main, options())
