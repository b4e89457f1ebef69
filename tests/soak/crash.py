"""Kills a process that saves and loads under load, again and again on one folder, and looks at what it left.

    python -m tests.soak.crash --rounds 200 --seed 1

After each kill the folder is opened again, and then: what is read is as it was put, or a miss; every block and every
image's features whose file had its name before the kill are hits; so are the blocks that were pinned all the time; no
temporary file is left; index and files agree; all files together are within the limit.
"""

import argparse
import hashlib
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import mlx.core as mx
import numpy as np

from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.cache.vision_feature_cache import VisionFeatureSSDCache
from omlx.storage.feature_file import FeatureKey, feature_name
from omlx.storage.folder import VISION_FOLDER, walk
from omlx.storage.tensor_file import TEMP_PREFIX, BlockBuffer, TensorSpec
from tests.storage.blocks import our_bytes

MB = 1 << 20
LIMIT = 24 * MB
SPECS = tuple(TensorSpec(f"{i}.keys", "F32", (2, 64, 128)) for i in range(4))
NAMES = [hashlib.sha256(b"crash %d" % n).digest() for n in range(160)]
PINNED = NAMES[:8]
MODELS = ("ma", "mb")
IMAGES = 12
START_S, LOAD_S = 0.8, 0.5  # the longest times until a kill: from the start of a process, from its first answer


def block(name: bytes) -> BlockBuffer:
    """The content that belongs to a name."""
    buffer = BlockBuffer.empty(SPECS)
    buffer.data[:] = np.frombuffer(np.random.default_rng(list(name)).bytes(buffer.nbytes), np.uint8)
    return buffer


def features(n: int) -> mx.array:
    return mx.array(np.random.default_rng(n).random((64 + n, 256), np.float32))


class Target:
    """A place for a block."""

    def __init__(self) -> None:
        self.specs = SPECS
        self.data = np.zeros(sum(spec.nbytes for spec in SPECS), np.uint8)

    def copy_from(self, found: BlockBuffer) -> None:
        self.data[:] = found.data

    def pieces(self) -> list[memoryview]:
        return [memoryview(self.data)]


class Stores:
    """The blocks of two models and the features of images, under one root."""

    def __init__(self, root: Path) -> None:
        self.blocks = [
            PagedSSDCacheManager(
                root / model, LIMIT, 2 * MB, root_dir=root, max_queue_bytes=4 * MB, free_reserve_bytes=0
            )
            for model in MODELS
        ]  # fmt: skip
        self.features = VisionFeatureSSDCache(root / VISION_FOLDER, 2, max_disk_bytes=2 * MB, free_reserve_bytes=0)

    def read(self, model: int, name: bytes) -> bool:
        """Whether it is a hit; a hit has to be right."""
        target = Target()
        found = self.blocks[model].read_block(name, target) is not None
        if found and not np.array_equal(target.data, block(name).data):
            raise AssertionError(f"WRONG BYTES in block {name.hex()} of {MODELS[model]}")
        return found

    def read_features(self, n: int) -> bool:
        found = self.features.get(f"h{n}", "m")
        if found is not None and not mx.array_equal(found, features(n)).item():
            raise AssertionError(f"WRONG FEATURES of image {n}")
        return found is not None

    def close(self) -> None:
        self.features.close(60)
        for store in self.blocks:
            store.close(60)


# ---- the process that is killed


def work(root: Path, seed: int) -> None:
    """Saves, loads, replaces and deletes in several threads until it is killed."""
    stores = Stores(root)
    for name in PINNED:
        stores.blocks[0].pin(name)
    print("ready", flush=True)
    threads = [threading.Thread(target=_guarded, args=(stores, seed * 10 + n)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _guarded(stores: Stores, seed: int) -> None:
    try:
        _load(stores, random.Random(seed))
    except BaseException as error:
        print(f"{error!r}", flush=True)
        raise


def _load(stores: Stores, dice: random.Random) -> None:
    while True:
        model, name, n = dice.randrange(len(MODELS)), dice.choice(NAMES[len(PINNED) :]), dice.randrange(IMAGES)
        store = stores.blocks[model]
        what = dice.random()
        if what < 0.5:
            store.save_block(name, block(name), 64, parent=dice.choice(NAMES), tokens=bytes(256))
        elif what < 0.8:
            stores.read(model, name)
        elif what < 0.85:
            store.delete_block(name)
        elif what < 0.9:
            store.save_block(name, block(name), 64, replace=True)
        elif what < 0.93:
            stores.blocks[0].touch(PINNED)
        elif what < 0.97:
            stores.features.put(f"h{n}", "m", features(n))
        else:
            stores.read_features(n)


# ---- the process that kills it and looks


def files_of(root: Path) -> set[tuple[str, bytes]]:
    return {file.key for file in walk(root) if file.key is not None}


def kill_one(root: Path, seed: int, dice: random.Random) -> tuple[set[tuple[str, bytes]], bool]:
    """The block files that were there at the moment of the kill, and whether the process had begun its work."""
    command = [sys.executable, "-m", "tests.soak.crash", "--work", str(root), "--seed", str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        assert child.stdout is not None
        begun = dice.random() < 0.75
        if begun:
            line = child.stdout.readline()
            assert line == "ready\n", line + child.stdout.read()
        time.sleep(dice.uniform(0, LOAD_S if begun else START_S))
        seen = files_of(root)
        child.kill()
        said = child.stdout.read().replace("ready\n", "")
        assert not said, said
    return seen, begun


def look(root: Path, seen: set[tuple[str, bytes]]) -> Counter[str]:
    """What a killed process left, seen by the next one. Raises AssertionError for anything that must not be."""
    there = files_of(root)
    images = {n for n in range(IMAGES) if (root / VISION_FOLDER / feature_name(FeatureKey(f"h{n}", "m"))).exists()}
    found = Counter(temporary=len(list(root.rglob(f"{TEMP_PREFIX}*"))), files=len(there), seen=len(seen & there))
    with closing(Stores(root)) as stores:
        assert all(store.flush(60) for store in stores.blocks)
        left = list(root.rglob(f"{TEMP_PREFIX}*"))
        assert not left, f"temporary files are left: {left}"
        assert our_bytes(root) <= LIMIT, "the files exceed the limit"
        evicted = sum(store.stats().evictions_ssd for store in stores.blocks)
        for model, folder in enumerate(MODELS):
            hits = {name for name in NAMES if stores.read(model, name)}
            wanted = {name for where, name in there if where == folder}
            assert hits <= wanted, "a block without a file is a hit"
            assert len(wanted - hits) <= evicted, f"{len(wanted - hits)} files of {folder} are no hits"
            found["hits"] += len(hits)
        assert all(stores.read(0, name) for name in PINNED), "a pinned block is lost"
        read = {n for n in range(IMAGES) if stores.read_features(n)}
        assert read == images, f"features of {images} have files, those of {read} are hits"
        found["features"] = len(read)
        found["evicted"] = evicted
        assert sum(store.stats().damaged for store in stores.blocks) == 0, "a whole file counts as damaged"
        problems = [*stores.blocks[0].check(), *stores.features.check()]
        assert not problems, problems
        stores.blocks[0].touch(PINNED)
    return found


def run(root: Path, rounds: int, seed: int, progress: bool = False) -> Counter[str]:
    """Kills `rounds` processes, one after the other; returns what was found, summed up."""
    with closing(Stores(root)) as stores:
        for name in PINNED:
            stores.blocks[0].save_block(name, block(name), 64)
    dice, total = random.Random(seed), Counter[str]()
    for number in range(rounds):
        seen, begun = kill_one(root, seed * 1000 + number, dice)
        total += look(root, seen) + Counter(begun=int(begun), rounds=1)
        if progress and (number + 1) % 10 == 0:
            print(f"{number + 1} rounds: {dict(total)}", flush=True)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.seed)
        return
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        total = run(Path(folder, "root"), options.rounds, options.seed, progress=True)
    print(f"all well after {options.rounds} rounds in {time.monotonic() - started:.0f} s: {dict(total)}")


if __name__ == "__main__":
    main()
