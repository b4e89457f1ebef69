import errno
import logging
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote

import mlx.core as mx
import numpy as np
import pytest

from omlx.arrays import DTYPES, own_copy
from omlx.cache.factory import CacheConfig, CacheFactory
from omlx.cache.vision_feature_cache import VisionFeatureSSDCache
from omlx.storage import disk_store, feature_folder, open_stores
from omlx.storage.feature_file import FeatureKey, feature_file_size, feature_name, write_feature_file
from omlx.storage.folder import remove
from omlx.storage.open_stores import open_store, release_store
from omlx.storage.tensor_file import BlockBuffer, TensorSpec, write_block_file
from tests.storage.blocks import block, meta, our_bytes
from tests.storage.children import become_nobody, open_folder, run_in_child, warnings_in

REPOSITORY = Path(__file__).parents[2]
SEEDS = REPOSITORY.parent / "shared" / "seeds"
MODEL = "clip_vit_large"
SPEC = TensorSpec("features", "F32", (4, 64))
SIZE = feature_file_size(FeatureKey("h0", MODEL), SPEC)


@pytest.fixture
def opened(tmp_path):
    caches = []

    def opener(folder="features", entries=10, **options):
        where = None if folder is None else tmp_path / folder
        caches.append(VisionFeatureSSDCache(where, entries, **{"free_reserve_bytes": 0, **options}))
        return caches[-1]

    yield opener
    for cache in caches:
        cache.close(60)


def features(n, shape=(4, 64)):
    return mx.array(np.random.default_rng(n).random(shape), mx.float32)


def put(cache, *numbers):
    for n in numbers:
        cache.put(f"h{n}", MODEL, features(n))


def has(cache, n):
    """Whether the features of this number are found; they have to be the right ones."""
    found = cache.get(f"h{n}", MODEL)
    assert found is None or equal(found, features(n))
    return found is not None


def equal(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def bits(array):
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array).tobytes()


def file_of(tmp_path, n, model=MODEL):
    return tmp_path / "features" / feature_name(FeatureKey(f"h{n}", model))


def on_disk(tmp_path, upto=20):
    return {n for n in range(upto) if file_of(tmp_path, n).exists()}


@pytest.fixture
def held_writer(monkeypatch):
    """The writer thread stops in front of its next file until this is set."""
    go, reached = threading.Event(), threading.Event()

    def write(*args):
        reached.set()
        assert go.wait(60)
        write_feature_file(*args)

    monkeypatch.setattr(feature_folder, "write_feature_file", write)
    yield go, reached
    go.set()


# ---- what the document shows


EXAMPLE = """
from pathlib import Path
from omlx.cache.vision_feature_cache import VisionFeatureSSDCache

# Configure SSD-backed cache
ssd_dir = Path("/tmp/omlx_vision_cache")
cache = VisionFeatureSSDCache(
    cache_dir=ssd_dir,
    max_memory_entries=100
)

# Store computed features
image_hash = "a1b2c3d4e5f6"
model_name = "clip_vit_large"
features = mx.random.normal((1, 768))  # Example vision tensor
cache.put(image_hash, model_name, features)

# Retrieve with automatic tier fallback
retrieved = cache.get(image_hash, model_name)

# Monitor performance
print(f"Cache hits: {cache.stats.hits}")
print(f"Cache misses: {cache.stats.misses}")
"""


def test_the_documents_example_runs_as_it_stands(capsys):
    names = {"mx": mx}  # the document does not import it
    path = Path("/tmp/omlx_vision_cache/a1b2c3d4e5f6_clip_vit_large.npy")
    try:
        exec(EXAMPLE, names)
        assert equal(names["retrieved"], names["features"])
        assert capsys.readouterr().out == "Cache hits: 1\nCache misses: 0\n"
        assert names["cache"].flush(60)
        assert equal(mx.load(str(path)), names["features"])
    finally:
        names["cache"].close()
        path.unlink(missing_ok=True)
        if not any(path.parent.iterdir()):
            path.parent.rmdir()


@pytest.mark.skipif(not SEEDS.is_dir(), reason="the documents are not here")
def test_the_example_is_the_documents(capsys):
    text = next(SEEDS.glob("000_*")).read_text()
    (script,) = re.findall(r"```python\s(.*?)```", text, re.DOTALL)
    assert script.split() == EXAMPLE.split()  # its line breaks were lost


def test_ram_is_lru_and_what_left_it_comes_back_from_disk(opened, tmp_path):
    cache = opened(entries=2)
    put(cache, 0, 1)
    assert has(cache, 0)
    put(cache, 2)
    cache.flush()
    assert cache.stats.evictions == 1
    assert on_disk(tmp_path) == {0, 1, 2}
    assert has(cache, 0) and cache.stats.disk_loads == 0  # 1 left, not 0
    assert has(cache, 1) and cache.stats.disk_loads == 1
    assert cache.stats.evictions == 2


def test_a_disk_hit_is_promoted_to_ram(opened, tmp_path):
    cache = opened()
    put(cache, 0)
    cache.close()
    cache = opened()
    assert has(cache, 0)
    file_of(tmp_path, 0).unlink()
    assert has(cache, 0)
    assert (cache.stats.hits, cache.stats.misses, cache.stats.disk_loads) == (2, 0, 1)


def test_stats_are_read_as_attributes_and_as_items(opened):
    cache = opened(entries=1)
    stats = cache.stats
    put(cache, 0, 1)
    assert has(cache, 1) and not has(cache, 7)
    assert (stats.hits, stats.misses, stats.evictions, stats.errors) == (1, 1, 1, 0)
    assert (stats["hits"], stats["misses"], stats["evictions"], stats["errors"]) == (1, 1, 1, 0)
    assert dict(stats) == {
        "hits": 1, "misses": 1, "evictions": 1, "disk_loads": 0, "disk_evictions": 0, "errors": 0,
    }  # fmt: skip
    with pytest.raises(KeyError):
        stats["keys"]


def test_without_a_folder_there_are_no_files_and_no_thread(opened, tmp_path):
    before = set(threading.enumerate())
    cache = opened(None, entries=1)
    put(cache, 0, 1)
    assert has(cache, 1) and not has(cache, 0)
    assert not set(threading.enumerate()) - before
    assert list(tmp_path.iterdir()) == []
    assert cache.flush() and cache.check() == [] and cache.close()
    assert cache.get("h1", MODEL) is None


def test_wrong_arguments_are_refused(opened):
    with pytest.raises(ValueError, match="-1"):
        opened(entries=-1)
    cache = opened()
    with pytest.raises(TypeError, match="strings"):
        cache.put(b"h", MODEL, features(0))
    with pytest.raises(TypeError, match="strings"):
        cache.get("h", None)
    with pytest.raises(TypeError, match="complex128"):
        cache.put("h", MODEL, np.zeros(3, np.complex128))
    assert cache.get("h", MODEL) is None


# ---- values


SHAPES = [(), (1,), (5,), (0,), (2, 0, 3), (3, 7), (1, 2, 3, 4, 5, 6)]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_and_shape_survives_and_other_programs_can_read_it(opened, tmp_path, dtype):
    cache = opened(entries=0)
    arrays = {}
    for n, shape in enumerate(SHAPES):
        raw = np.random.default_rng(n).integers(0, 100, shape)
        arrays[n] = mx.array(raw).astype(dtype) if dtype != mx.bool_ else mx.array(raw > 50)
        cache.put(f"h{n}", MODEL, arrays[n])
    cache.flush()
    for n, array in arrays.items():
        assert equal(cache.get(f"h{n}", MODEL), array)
        path = file_of(tmp_path, n)
        assert equal(mx.load(str(path)), array)
        loaded = np.load(path)
        assert loaded.shape == array.shape and loaded.tobytes() == bits(array)
    assert cache.stats.disk_loads == len(SHAPES)


def test_all_65536_values_of_bfloat16_survive_to_the_last_bit(opened):
    every = mx.array(np.arange(65536, dtype=np.uint16)).view(mx.bfloat16)
    cache = opened(entries=0)
    cache.put("h", MODEL, every)
    cache.flush()
    assert equal(cache.get("h", MODEL), every)
    assert cache.stats.disk_loads == 1


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float64).reshape(3, 4),
        np.arange(12, dtype=">f4").reshape(3, 4),
        np.arange(60, dtype=np.int64).reshape(3, 4, 5)[::2, 1:3, ::-1],
        np.asfortranarray(np.arange(12, dtype=np.float16).reshape(3, 4)),
        np.array(5, np.uint8),
        np.ones((2, 3), np.bool_),
    ],
    ids=["float64", "big endian", "strided", "fortran", "scalar", "bool"],
)
def test_numpy_arrays_are_kept_as_they_are(opened, array):
    cache = opened(entries=1)
    array.flags.writeable = False
    for _ in ("ram", "disk"):
        cache.put("h", MODEL, array)
        found = np.asarray(cache.get("h", MODEL))
        assert found.dtype == array.dtype.newbyteorder("=") and np.array_equal(found, array)
        cache.close()
        cache = opened(entries=0)


def test_strided_mlx_arrays_are_kept_as_they_look(opened):
    cache = opened(entries=0)
    views = [
        features(1)[:, ::3],
        features(5)[::-1],
        features(2).T,
        features(3)[2],
        mx.broadcast_to(features(4)[:1], (3, 64)),
    ]
    views += [view.astype(mx.bfloat16) for view in views]
    for n, view in enumerate(views):
        cache.put(f"v{n}", MODEL, view)
    cache.flush()
    for n, view in enumerate(views):
        assert equal(cache.get(f"v{n}", MODEL), mx.contiguous(view))


@pytest.mark.parametrize("entries", [5, 0], ids=["ram", "disk"])
def test_nobody_changes_what_others_get(opened, entries):
    cache = opened(entries=entries)
    given = features(0)
    cache.put("h0", MODEL, given)
    np.asarray(given)[:] = 7
    given += 1
    from_numpy = np.zeros(3, np.float32)
    cache.put("n", MODEL, from_numpy)
    from_numpy[:] = 7
    for _ in range(3):
        found = cache.get("h0", MODEL)
        assert equal(found, features(0))
        found += 1
        found[0] = 9
        mx.eval(found)
        assert not cache.get("n", MODEL).any()
        cache.flush()
    assert has(cache, 0)


def test_a_change_of_what_was_read_from_disk_does_not_reach_ram(opened):
    written(opened, 0)
    cache = opened()
    found = cache.get("h0", MODEL)
    found += 1
    found[0] = 9
    assert has(cache, 0) and cache.stats.disk_loads == 1


def test_a_change_by_the_reader_does_not_reach_a_file_that_is_being_written(opened, held_writer, tmp_path):
    cache = opened(entries=1)
    put(cache, 0)
    found = cache.get("h0", MODEL)
    put(cache, 1)  # 0 leaves RAM: only the reader and the writer have it
    found[0] = 9
    found += 1
    mx.eval(found)
    held_writer[0].set()
    cache.flush()
    assert equal(mx.load(str(file_of(tmp_path, 0))), features(0))


def test_what_comes_out_is_evaluated_and_may_cross_threads(opened):
    cache = opened(entries=1)
    with ThreadPoolExecutor(1) as pool:
        lazy = pool.submit(lambda: put(cache, 0, 1))  # evaluated where they were made
        lazy.result()
        cache.flush()
        from_disk, from_ram = pool.submit(lambda: [cache.get(f"h{n}", MODEL) for n in (0, 1)]).result()
    for n, found in ((0, from_disk), (1, from_ram)):
        # an unevaluated array of another thread would raise here
        assert mx.array_equal(found, features(n)).item()


def test_putting_again_replaces(opened, tmp_path):
    cache = opened(entries=0)
    put(cache, 0)
    cache.flush()
    cache.put("h0", MODEL, features(1, (2, 8)))
    assert equal(cache.get("h0", MODEL), features(1, (2, 8)))
    cache.flush()
    assert equal(cache.get("h0", MODEL), features(1, (2, 8)))
    assert cache.usage.disk_bytes == our_bytes(tmp_path)
    assert cache.check() == []


# ---- names


NAMES = [
    "a",
    "a_b",
    "a__b",
    "_",
    "",
    "a/b",
    "a%2Fb",
    "../../etc/x",
    "..",
    ".",
    ".hidden",
    "a\0b",
    "ü",
    "u\u0308",
    "模型",
]
NAMES += ["a b", "~", "A", "\ud800", "a\nb", "con", "C:\\x", "x" * 250, "x" * 250 + "y", "/" * 300, "模" * 100, "m.npy"]


def test_every_pair_of_names_has_a_file_of_its_own_inside_the_folder(opened, tmp_path):
    pairs = [(hash_, model) for hash_ in NAMES for model in NAMES]
    assert len({feature_name(FeatureKey(*pair)) for pair in pairs}) == len(pairs)
    cache = opened(entries=0)
    some = [pair for n, pair in enumerate(pairs) if n % 5 == 0]
    for n, pair in enumerate(some):
        cache.put(*pair, mx.array(n))
    assert cache.flush()
    assert len(list((tmp_path / "features").iterdir())) == len(some)
    assert [path.name for path in tmp_path.iterdir()] == ["features"]
    cache.close()
    cache = opened(entries=0)
    assert cache.usage.disk_entries == len(some)
    for n, pair in enumerate(some):
        assert cache.get(*pair).item() == n


@pytest.mark.parametrize("image_hash", ["a1b2", "a_b", "..", "a/b", "ü", "%5F"])
@pytest.mark.parametrize("model", ["clip_vit_large", "mlx-community/Qwen2.5-VL_x", "..", "模型", ""])
def test_a_name_can_be_read_back_from_its_file_name(image_hash, model):
    name = feature_name(FeatureKey(image_hash, model))
    first, _, second = name.removesuffix(".npy").partition("_")
    assert (unquote(first), unquote(second)) == (image_hash, model)


def test_plain_names_stay_as_the_document_has_them():
    assert feature_name(FeatureKey("a1b2c3d4e5f6", "clip_vit_large")) == "a1b2c3d4e5f6_clip_vit_large.npy"


def test_features_of_one_image_for_two_models_do_not_mix(opened):
    cache = opened(entries=0)
    cache.put("h", "one", features(1))
    cache.put("h", "two", features(2))
    for _ in ("queued", "written"):
        assert equal(cache.get("h", "one"), features(1)) and equal(cache.get("h", "two"), features(2))
        cache.flush()
    assert cache.get("h", "three") is None


# ---- several at once


def test_put_does_not_wait_and_a_second_cache_sees_it_at_once(opened, held_writer, tmp_path):
    one, two = opened(), opened()
    put(one, 0)
    assert held_writer[1].wait(60) and on_disk(tmp_path) == set()
    assert has(two, 0) and two.stats.disk_loads == 0
    held_writer[0].set()
    assert two.flush() and on_disk(tmp_path) == {0}


def test_a_second_cache_does_not_answer_with_what_was_replaced(opened):
    one, two = opened(), opened()
    put(one, 0)
    assert has(two, 0)
    one.put("h0", MODEL, features(5))
    assert equal(two.get("h0", MODEL), features(5))
    two.put("h0", MODEL, features(6))
    assert equal(one.get("h0", MODEL), features(6))


def test_a_read_that_began_before_a_put_does_not_bring_the_old_features_back(opened, monkeypatch):
    one, two = opened(entries=0), opened()
    put(one, 0)
    one.flush()
    read = feature_folder.read_feature_file

    def slow(*args):
        size = read(*args)
        one.put("h0", MODEL, features(5))
        return size

    monkeypatch.setattr(feature_folder, "read_feature_file", slow)
    assert has(two, 0)
    monkeypatch.setattr(feature_folder, "read_feature_file", read)
    assert equal(two.get("h0", MODEL), features(5))


def test_closing_one_cache_leaves_the_other_at_work(opened, tmp_path):
    one, two = opened(), opened()
    put(one, 0)
    assert one.close() and one.close()
    assert one.get("h0", MODEL) is None
    put(one, 3)
    put(two, 1)
    assert has(two, 0)
    two.close()
    assert on_disk(tmp_path) == {0, 1}


def test_nothing_waits_for_a_file_that_is_read_or_written(opened, held_writer, monkeypatch):
    cache = opened(entries=3)
    held_writer[0].set()
    put(cache, 0, 1, 2, 3)
    cache.flush()
    read, reading, go = feature_folder.read_feature_file, threading.Event(), threading.Event()

    def slow(*args):
        reading.set()
        assert go.wait(60)
        return read(*args)

    monkeypatch.setattr(feature_folder, "read_feature_file", slow)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(has, cache, 0)
        assert reading.wait(60)
        held_writer[0].clear()
        held_writer[1].clear()
        put(cache, 4)
        assert held_writer[1].wait(60)
        assert cache._memory_lock.acquire(timeout=60)
        cache._memory_lock.release()
        put(cache, 5)
        assert has(cache, 5) and has(cache, 4) and cache.usage.disk_entries == 6
        go.set()
        assert result.result(60)


def test_the_memory_lock_guards_ram_and_counters(opened):
    cache = opened(None)
    put(cache, 0)
    with ThreadPoolExecutor(1) as pool:
        with cache._memory_lock:
            results = [pool.submit(cache.get, "h0", MODEL), pool.submit(put, cache, 1)]
            time.sleep(0.05)
            assert not any(result.done() for result in results) and cache.stats.hits == 0
        assert results[0].result(60) is not None


def test_many_threads_at_once_get_right_answers_or_none(opened):
    caches = [opened(entries=3, max_disk_bytes=8 * SIZE), opened(entries=2)]

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(150):
            cache, n = caches[rng.integers(2)], int(rng.integers(12))
            if rng.random() < 0.4:
                put(cache, n)
            else:
                has(cache, n)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert caches[0].check() == []
    stats = [cache.stats for cache in caches]
    assert sum(s.hits + s.misses for s in stats) > 0 and stats[0].errors == 0
    assert caches[0].usage.disk_bytes <= 8 * SIZE


SCRIPT = """
    import sys
    from pathlib import Path
    import mlx.core as mx
    from omlx.cache.vision_feature_cache import VisionFeatureSSDCache
    cache = VisionFeatureSSDCache(Path(sys.argv[1]), free_reserve_bytes=0)
    for n in range(20):
        cache.put(f"s{n}", "m", mx.full((300, 300), n))
"""


def test_another_process_that_never_closes_keeps_its_files_and_we_find_them(opened, tmp_path):
    cache = opened()
    assert cache.get("s7", "m") is None
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / "features")]
    subprocess.run(command, check=True, timeout=60, cwd=REPOSITORY)
    for n in range(20):
        assert equal(cache.get(f"s{n}", "m"), mx.full((300, 300), n))
    assert cache.stats.disk_loads == 20
    cache.flush()
    assert cache.usage.disk_bytes == our_bytes(tmp_path)
    assert cache.check() == []


# ---- files that are not what they should be


def written(opened, *numbers):
    cache = opened()
    put(cache, *numbers)
    cache.close()


CUTS = {
    "empty": 0,
    "8 bytes": 8,
    "header only": 128,
    "half": SIZE // 2,
    "without trailer": 128 + SPEC.nbytes,
    "one short": SIZE - 1,
}
FLIPS = {
    "magic": 1,
    "header length": 9,
    "dtype": 22,
    "shape": 58,
    "padding": 120,
    "first": 128,
    "last": 127 + SPEC.nbytes,
}
FLIPS |= {"label": 140 + SPEC.nbytes, "checksum": SIZE - 28, "label length": SIZE - 12, "mark": SIZE - 1}


@pytest.mark.parametrize("known", [True, False], ids=["in use", "before start"])
@pytest.mark.parametrize("how", [*CUTS, *FLIPS, "longer", "zeroed", "plain npy"])
def test_a_damaged_file_is_a_miss_counted_removed_and_healed(opened, tmp_path, how, known):
    written(opened, 0, 1)
    cache = opened() if known else None
    path = file_of(tmp_path, 0)
    raw = bytearray(path.read_bytes())
    if how in CUTS:
        raw = raw[: CUTS[how]]
    elif how in FLIPS:
        raw[FLIPS[how]] ^= 4
    elif how == "longer":
        raw += b"\0"
    elif how == "zeroed":
        raw[200:400] = bytes(200)
    path.write_bytes(raw)
    if how == "plain npy":
        np.save(path, np.zeros((4, 64), np.float32))
    cache = cache or opened()
    assert not has(cache, 0)
    assert cache.stats.errors == cache.stats.files.damaged == 1 and cache.stats.misses == 1
    cache.flush()
    assert on_disk(tmp_path) == {1}
    assert not has(cache, 0) and cache.stats.errors == 1
    put(cache, 0)
    assert cache.check() == [] and has(cache, 1)
    cache.close()
    assert has(opened(), 0)


@pytest.mark.parametrize("known", [True, False], ids=["in use", "before start"])
@pytest.mark.parametrize("how", ["swapped", "folder", "pipe", "deleted"])
def test_something_else_in_a_files_place_is_a_miss_and_heals(opened, tmp_path, caplog, how, known):
    written(opened, 0, 1)
    cache = opened() if known else None
    path = file_of(tmp_path, 0)
    path.unlink()
    if how == "swapped":
        shutil.copy(file_of(tmp_path, 1), path)
    elif how == "folder":
        (path / "inside").mkdir(parents=True)
    elif how == "pipe":
        os.mkfifo(path)
    cache = cache or opened()
    assert not has(cache, 0) and not has(cache, 0) and has(cache, 1)
    assert cache.stats.files.damaged == len(warnings_in(caplog)) == (how != "deleted") and cache.stats.misses == 2
    assert cache.flush() and not path.exists()
    assert len(list(path.parent.glob("*.set-aside-*"))) == (how == "folder")
    put(cache, 0)
    assert cache.check() == []
    cache.close()
    assert has(opened(), 0)


def unreadable(folder):
    """As a user who is not root, in a process of its own."""
    become_nobody()
    for n, known in enumerate((True, False)):
        cache = VisionFeatureSSDCache(folder, 0, free_reserve_bytes=0)
        put(cache, n)
        assert cache.flush(60)
        if not known:
            cache.close()
        path = folder / feature_name(FeatureKey(f"h{n}", MODEL))
        path.chmod(0)
        if not known:
            cache = VisionFeatureSSDCache(folder, 0, free_reserve_bytes=0)
        assert not has(cache, n) and cache.stats.errors == 1
        put(cache, n)
        assert cache.flush(60) and has(cache, n) and cache.stats.errors == 1 and cache.check() == []
        cache.close()


def test_an_unreadable_file_is_a_miss_and_heals():
    with open_folder() as folder:
        run_in_child(unreadable, folder / "features")


def test_swapped_files_are_misses(opened, tmp_path):
    written(opened, 0, 1)
    a, b = file_of(tmp_path, 0), file_of(tmp_path, 1)
    raw = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(raw)
    cache = opened()
    assert not has(cache, 0) and not has(cache, 1)
    assert cache.stats.files.damaged == 2


def test_a_deleted_file_is_a_miss_and_no_error(opened, tmp_path):
    written(opened, 0)
    cache = opened()
    file_of(tmp_path, 0).unlink()
    assert not has(cache, 0)
    assert (cache.stats.misses, cache.stats.errors, cache.usage.disk_entries) == (1, 0, 0)


def test_check_names_what_is_wrong(opened, tmp_path):
    cache = opened()
    put(cache, 0, 1, 2)
    assert cache.check() == []
    file_of(tmp_path, 0).unlink()
    raw = bytearray(file_of(tmp_path, 1).read_bytes())
    raw[200] ^= 1
    file_of(tmp_path, 1).write_bytes(raw)
    found = cache.check()
    assert len(found) == 2 and any("h0_" in line for line in found) and any("h1_" in line for line in found)


def test_junk_in_the_folder_is_neither_counted_nor_touched(opened, tmp_path):
    folder = tmp_path / "features"
    folder.mkdir()
    np.save(folder / "my_notes.npy", np.zeros(3000))
    for name in ("notes.txt", "a.npy", ".omlx-x.tmp", ".DS_Store", "h9_m.npy.bak"):
        (folder / name).write_bytes(b"junk" * 100)
    (folder / "sub_folder.npy").mkdir()
    (folder / "0").mkdir()
    write_feature_file(folder / "copy_of_h1.npy", tmp_path / "t", FeatureKey("h1", MODEL), BlockBuffer.empty((SPEC,)))
    before = {path.name: path.stat() for path in folder.iterdir()}
    cache = opened(max_disk_bytes=3 * SIZE)
    assert cache.usage[2:] == (0, 0)
    put(cache, *range(10))
    cache.flush()
    assert cache.usage[2:] == (3, 3 * SIZE)
    after = {path.name: path.stat() for path in folder.iterdir()}
    assert {name: after[name] for name in before} == before
    assert len(after) == len(before) + 3


def test_a_folder_in_a_files_place_is_set_aside(opened, tmp_path):
    cache = opened(entries=0)
    file_of(tmp_path, 0).mkdir()
    (file_of(tmp_path, 0) / "x").touch()
    put(cache, 0)
    assert cache.flush() and has(cache, 0)
    (aside,) = (tmp_path / "features").glob("*.set-aside-*")
    assert (aside / "x").exists()


def test_what_a_dead_process_left_half_written_is_removed(opened, tmp_path):
    folder = tmp_path / "features"
    folder.mkdir()
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    left = [folder / f".omlx-{pid}.tmp" for pid in (int(dead.stdout), os.getpid(), os.getppid())]
    for path in left:
        path.touch()
    opened()
    assert [path.exists() for path in left] == [False, False, True]


def test_a_temporary_file_older_than_the_process_that_has_its_number_now_is_removed(opened, tmp_path):
    folder = tmp_path / "features"
    folder.mkdir()
    left = folder / f".omlx-{os.getppid()}.tmp"
    left.touch()
    os.utime(left, (1_000_000_000, 1_000_000_000))
    opened()
    assert not left.exists()


def test_files_of_another_version_count_are_never_used_and_go_first(opened, tmp_path):
    written(opened, 0, 1, 2)
    path = file_of(tmp_path, 2)
    path.write_bytes(path.read_bytes().replace(b'"format":"1"', b'"format":"2"'))
    cache = opened(entries=0, max_disk_bytes=3 * SIZE)
    assert cache.usage.disk_entries == 3 and not has(cache, 2) and path.exists()
    assert cache.stats.files.damaged == 0 and cache.check() == []
    put(cache, 3)
    assert cache.flush() and on_disk(tmp_path) == {0, 1, 3}
    cache.put("h2", MODEL, features(2))
    assert cache.flush() and has(cache, 2)


def test_features_take_the_place_of_a_file_of_another_version(opened, tmp_path):
    written(opened, 2)
    path = file_of(tmp_path, 2)
    path.write_bytes(path.read_bytes().replace(b'"format":"1"', b'"format":"2"'))
    cache = opened(entries=0)
    put(cache, 2)
    assert cache.flush() and has(cache, 2) and cache.check() == []


# ---- restart, limits


def test_order_of_use_on_disk_survives_a_restart(opened, tmp_path):
    cache = opened(entries=2)
    for n in range(5):
        put(cache, n)
    cache.flush()
    assert has(cache, 0)  # from disk
    assert has(cache, 4)  # from RAM
    cache.close()
    cache = opened(max_disk_bytes=2 * SIZE)
    assert cache.stats.disk_evictions == 3 and cache.usage.disk_entries == 2
    assert on_disk(tmp_path) == {0, 4}
    put(cache, 5)
    cache.flush()
    assert on_disk(tmp_path) == {4, 5}


def test_the_files_never_exceed_their_limit(opened, tmp_path, monkeypatch):
    seen = []

    def write(path, temporary, *what):
        write_feature_file(path, temporary, *what)
        seen.append(our_bytes(tmp_path))

    monkeypatch.setattr(feature_folder, "write_feature_file", write)
    cache = opened(entries=0, max_disk_bytes=5 * SIZE + 10)
    for n in range(30):
        put(cache, n % 12)
        has(cache, n % 2)
    cache.flush()
    assert max(seen) <= 5 * SIZE + 10 and cache.usage.disk_bytes == our_bytes(tmp_path)
    assert {0, 1} < on_disk(tmp_path)  # in use all the time
    assert cache.stats.errors == cache.stats.files.declined == 0 and cache.check() == []


def test_features_that_wait_to_replace_others_give_their_old_files_room_away(opened, held_writer, tmp_path):
    held_writer[0].set()
    cache = opened(entries=0, max_disk_bytes=2 * SIZE)
    put(cache, 0, 1)
    cache.flush()
    held_writer[0].clear()
    put(cache, 3, 0, 1)  # when 3 is written the files of 0 and 1 are old
    held_writer[0].set()
    cache.flush()
    assert cache.stats.files.declined == 0 and on_disk(tmp_path) == {0, 1}
    assert cache.check() == []


def test_features_that_made_room_are_not_written_again_at_a_flush_or_when_they_leave_ram(opened, tmp_path):
    cache = opened(entries=8, max_disk_bytes=3 * SIZE)
    for n in range(5):
        put(cache, n)
        assert cache._files.flush(60)
    assert on_disk(tmp_path) == {2, 3, 4}
    assert cache.flush() and on_disk(tmp_path) == {2, 3, 4} and cache.stats.disk_evictions == 2
    for n in range(5, 10):
        put(cache, n)
    assert cache.flush() and on_disk(tmp_path) == {7, 8, 9} and cache.stats.disk_evictions == 7
    assert has(cache, 5) and cache.flush() and on_disk(tmp_path) == {5, 8, 9}  # used, so it is wanted again


def test_features_larger_than_the_limit_are_declined_and_evict_nothing(opened, tmp_path, caplog):
    cache = opened(entries=1, max_disk_bytes=3 * SIZE)
    put(cache, 0, 1, 2)
    cache.flush()
    for n in (7, 8, 7):
        cache.put(f"h{n}", MODEL, features(n, (40, 64)))
        assert cache.get(f"h{n}", MODEL) is not None  # RAM takes it
    cache.flush()
    assert on_disk(tmp_path) == {0, 1, 2} and cache.stats.files.declined == 3
    assert sum("do not fit" in record.message for record in caplog.records) == 1


def test_a_declined_replacement_does_not_leave_the_old_features(opened, tmp_path):
    cache = opened(entries=0, max_disk_bytes=3 * SIZE)
    put(cache, 0)
    cache.flush()
    cache.put("h0", MODEL, features(7, (40, 64)))
    assert cache.get("h0", MODEL) is None
    cache.flush()
    assert on_disk(tmp_path) == set() and cache.usage[2:] == (0, 0)


def test_free_space_is_left_on_the_disk(opened, tmp_path, monkeypatch):
    cache = opened(entries=1, free_reserve_bytes=4 * SIZE)
    put(cache, *range(4))
    cache.flush()
    real = os.statvfs

    class Disk:  # 10 files large
        def __init__(self, path):
            used = our_bytes(tmp_path)
            self.f_frsize, self.f_blocks, self.f_bavail = 1, 10 * SIZE, 10 * SIZE - used

    monkeypatch.setattr(os, "statvfs", Disk)
    put(cache, *range(4, 9))
    cache.flush()
    assert on_disk(tmp_path) == set(range(3, 9)) and real is not None


def test_with_a_full_queue_put_returns_and_the_file_comes_later(opened, held_writer, tmp_path):
    cache = opened(max_queue_bytes=2 * SIZE)
    put(cache, 0, 1, 2, 3)
    assert cache.stats.files.dropped_writes == 2
    held_writer[0].set()
    cache._files.flush(60)
    assert on_disk(tmp_path) == {0, 1}
    assert has(cache, 2)  # used again: queued
    assert cache.flush()  # and so is the rest
    assert on_disk(tmp_path) == {0, 1, 2, 3}


def test_what_leaves_ram_without_a_file_is_written_then(opened, held_writer, tmp_path):
    cache = opened(entries=2, max_queue_bytes=SIZE)
    put(cache, 0, 1)
    held_writer[0].set()
    cache._files.flush(60)
    has(cache, 0)
    put(cache, 2)  # 1 leaves RAM; the queue has room for one
    cache.flush()
    assert 1 in on_disk(tmp_path)


# ---- a disk that fails


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_counted_said_once_and_gets_over_it(opened, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(feature_folder, "_RETRY_S", 0.0)
    cache = opened()
    monkeypatch.setattr(feature_folder, "write_feature_file", full)
    put(cache, 0, 1, 2)
    assert not cache.flush()
    assert cache.stats.errors == cache.stats.files.write_errors >= 3
    assert has(cache, 0) and has(cache, 1)
    cache.flush()
    assert sum("No space left" in record.message for record in caplog.records) == 1
    monkeypatch.setattr(feature_folder, "write_feature_file", write_feature_file)
    assert has(cache, 2)  # a hit is enough for it to be written again
    cache._files.flush(60)
    assert on_disk(tmp_path) == {2}
    assert cache.flush() and on_disk(tmp_path) == {0, 1, 2}
    assert sum("works again" in record.message for record in caplog.records) == 1
    assert cache.check() == []


def test_a_failed_write_does_not_leave_older_features_to_be_found(opened, tmp_path, monkeypatch):
    cache = opened(entries=0)
    put(cache, 0)
    cache.flush()
    monkeypatch.setattr(feature_folder, "write_feature_file", full)
    cache.put("h0", MODEL, features(5))
    cache.flush()
    assert cache.get("h0", MODEL) is None
    cache.flush()
    assert on_disk(tmp_path) == set()


def test_a_file_that_cannot_be_removed_is_not_read_and_counts_on(opened, tmp_path, monkeypatch):
    cache = opened(entries=0)
    put(cache, 0)
    cache.flush()
    monkeypatch.setattr(feature_folder, "remove", full)
    raw = bytearray(file_of(tmp_path, 0).read_bytes())
    raw[200] ^= 1
    file_of(tmp_path, 0).write_bytes(raw)
    for _ in range(3):
        assert not has(cache, 0)
        cache.flush()
    assert cache.stats.files.damaged == 1 and cache.usage.disk_bytes == SIZE
    put(cache, 0)
    cache.flush()
    assert has(cache, 0)


def test_a_file_that_cannot_be_read_now_is_a_miss_and_stays(opened, tmp_path, monkeypatch, caplog):
    cache = opened(entries=0)
    put(cache, 0)
    cache.flush()
    read = feature_folder.read_feature_file

    def fails(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(feature_folder, "read_feature_file", fails)
    assert not has(cache, 0) and not has(cache, 0)
    assert cache.stats.errors == cache.stats.files.read_errors == 2 and cache.stats.files.damaged == 0
    assert sum("Too many open files" in record.message for record in caplog.records) == 1
    monkeypatch.setattr(feature_folder, "read_feature_file", read)
    assert has(cache, 0)


def test_a_folder_that_vanishes_is_made_again(opened, tmp_path):
    cache = opened(entries=1)
    put(cache, 0, 1)
    cache.flush()
    for path in (tmp_path / "features").iterdir():
        path.unlink()
    (tmp_path / "features").rmdir()
    assert not has(cache, 0) and has(cache, 1)
    put(cache, 2)
    assert cache.flush()
    assert on_disk(tmp_path) == {1, 2} or on_disk(tmp_path) == {2}
    assert cache.check() == []


def test_a_file_where_the_folder_should_be_leaves_ram_at_work(opened, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(feature_folder, "_RETRY_S", 0.0)
    (tmp_path / "features").write_text("not a folder")
    cache = opened()
    put(cache, 0)
    assert not cache.flush() and has(cache, 0)
    cache.flush()
    assert (tmp_path / "features").read_text() == "not a folder"
    assert sum("features folder" in record.message for record in caplog.records) == 1
    (tmp_path / "features").unlink()
    assert has(cache, 0) and cache.flush() and on_disk(tmp_path) == {0}


def test_folders_and_files_are_for_their_owner_only(opened, tmp_path):
    cache = opened("a/ü b/features")
    put(cache, 0)
    cache.flush()
    folder = tmp_path / "a/ü b/features"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]


# ---- under the root of a block store


BLOCK = meta(0).file_size


@pytest.fixture
def root(tmp_path):
    stores = []

    def opener(limit):
        stores.append(open_store(tmp_path, limit, 64 << 20, 0))
        return stores[-1]

    yield opener
    for store in stores:
        release_store(store, 60)


def put_blocks(store, *numbers):
    for n in numbers:
        assert store.blocks.put("m", meta(n), block(n), write_block_file, may_wait=False) == "queued"
    assert store.flush(60)


def blocks_bytes(store):
    return sum(nbytes for _, nbytes in store.blocks.usage().values())


def test_files_count_towards_the_limit_of_the_root_and_blocks_make_room(opened, root, tmp_path, monkeypatch):
    limit = 10 * BLOCK + 40_000  # the index takes some
    store = root(limit)
    put_blocks(store, *range(10))
    seen = []

    def write(path, temporary, *what):
        write_feature_file(path, temporary, *what)
        seen.append(our_bytes(tmp_path))

    def slow_remove(path):
        time.sleep(0.02)
        remove(path)

    monkeypatch.setattr(disk_store, "remove", slow_remove)
    monkeypatch.setattr(feature_folder, "write_feature_file", write)
    big = (BLOCK // 4 // 64, 64)
    cache = opened(entries=1)
    for n in range(4):
        cache.put(f"h{n}", MODEL, features(n, big))
    cache.flush()
    own = sum(path.stat().st_size for path in (tmp_path / "features").iterdir())
    assert store.blocks.bytes == blocks_bytes(store) + own + (tmp_path / "index.sqlite").stat().st_size
    assert 0 < blocks_bytes(store) < 10 * BLOCK
    # While the index is in a transaction its journal may be beyond the limit, by less than a block.
    assert max(seen) <= limit + BLOCK and our_bytes(tmp_path) <= limit + BLOCK
    assert cache.stats.disk_evictions == 0
    assert store.check() == [] and cache.check() == []


def test_features_wait_for_a_slow_disk_to_make_their_room(opened, root, tmp_path, monkeypatch):
    """However long the blocks that have to go take, the features come after them."""
    store = root(10 * BLOCK + 40_000)
    put_blocks(store, *range(10))
    gate = threading.Event()

    def held_remove(path):
        assert gate.wait(60)
        remove(path)

    monkeypatch.setattr(open_stores, "_SETTLE_S", 0.05)
    monkeypatch.setattr(disk_store, "remove", held_remove)
    cache = opened(entries=1)
    cache.put("h0", MODEL, features(0, (4 * BLOCK // 4 // 64, 64)))
    assert not cache.flush(0.5) and on_disk(tmp_path) == set() and not list((tmp_path / "features").iterdir())
    gate.set()
    assert cache.flush(60) and on_disk(tmp_path) == {0}
    assert our_bytes(tmp_path) <= 10 * BLOCK + 40_000 + BLOCK  # the index may be in a transaction, with its journal


def test_features_evict_only_features_beyond_their_own_share(opened, root, tmp_path):
    store = root(100 * BLOCK)
    put_blocks(store, 0, 1)
    cache = opened(max_disk_bytes=3 * SIZE)
    put(cache, *range(9))
    cache.flush()
    assert on_disk(tmp_path) == {6, 7, 8}
    assert blocks_bytes(store) == 2 * BLOCK


def test_features_that_the_root_has_no_room_for_are_declined(opened, root, tmp_path):
    store = root(60_000)
    cache = opened(entries=0)
    cache.put("h0", MODEL, features(0, (300, 64)))
    cache.flush()
    assert cache.get("h0", MODEL) is None and cache.stats.files.declined == 1
    for n in range(1, 80):
        put(cache, n)
    cache.flush()
    assert our_bytes(tmp_path) <= 60_000 + 8 and cache.stats.disk_evictions > 0
    assert store.blocks.bytes <= 60_000


def test_blocks_in_use_are_not_evicted_for_features(opened, root):
    store = root(1 << 20)
    put_blocks(store, 0, 1)
    store.blocks.lower_limit(store.blocks.bytes + 1000)
    for n in (0, 1):
        store.blocks.pin(("m", meta(n).block_hash))
    cache = opened(entries=0)
    cache.put("h0", MODEL, features(0, (4 * BLOCK // 4 // 64, 64)))
    cache.flush()
    assert cache.get("h0", MODEL) is None and cache.stats.files.declined == 1
    assert blocks_bytes(store) == 2 * BLOCK


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
def test_a_root_that_is_opened_later_counts_them_too(opened, root, tmp_path, closed):
    cache = opened()
    put(cache, *range(8))
    cache.flush()
    if closed:
        cache.close()
    store = root(1 << 20)
    assert store.blocks.bytes >= 8 * SIZE
    assert store.blocks.bytes == 8 * SIZE + (tmp_path / "index.sqlite").stat().st_size


def test_files_that_were_there_before_count_from_the_start(opened, root, tmp_path):
    (tmp_path / "features").mkdir()
    for n in range(3):
        write_feature_file(file_of(tmp_path, n), tmp_path / "t", FeatureKey(f"h{n}", MODEL), BlockBuffer.empty((SPEC,)))
    store = root(1 << 20)
    opened()
    assert store.blocks.bytes == 3 * SIZE + (tmp_path / "index.sqlite").stat().st_size


def test_a_folder_outside_of_the_root_does_not_count(opened, tmp_path):
    store = open_store(tmp_path / "root", 1 << 20, 1 << 20, 0)
    try:
        before = store.blocks.bytes
        cache = opened("root-2/features")
        put(cache, 0)
        cache.flush()
        assert store.blocks.bytes == before
    finally:
        release_store(store, 60)


def test_own_copy_shares_no_memory():
    array = mx.zeros((4, 4))
    copy = own_copy(array)
    np.asarray(array)[:] = 1
    assert not copy.any()


def test_the_factory_puts_them_under_the_cache_root_with_a_tenth_of_its_limit(tmp_path):
    config = CacheConfig(paged_ssd_cache_dir=tmp_path, max_paged_ssd_cache_size=10 * 3 * SIZE, hot_cache_max_size=0)
    cache = CacheFactory.create_vision_feature_cache(config)
    put(cache, *range(5))
    cache.flush()
    assert cache.stats.disk_evictions == 2
    assert len(list((tmp_path / "vision_features").iterdir())) == 3
    cache.close()
    in_ram = CacheFactory.create_vision_feature_cache(CacheConfig())
    put(in_ram, 0)
    assert has(in_ram, 0) and in_ram.usage.disk_entries == 0
