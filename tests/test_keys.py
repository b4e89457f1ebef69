"""Keys that cannot lie: KV of another state of the world is never used, that of the same state always."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from omlx.cache.block import block_hash, pack_tokens, root_hash
from omlx.cache.layer_state import CacheLayout, StatePart
from omlx.cache.prefix_cache import CacheIdentity
from omlx.model.fingerprint import fingerprint
from omlx.model.weights import read_weight_files
from omlx.request import Request
from omlx.testing import make_tiny_model
from tests.adapters import make_adapter
from tests.dict_store import DictStore
from tests.engine.test_pool import ask, request, running
from tests.tiny import Bench, TinyRunner

LENGTH = 97


# ---- the state of the world


class World:
    """A model folder, its cache folder, and servers that come and go."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.model = make_tiny_model(home / "m" / "tiny")
        self.file = self.model / "model.safetensors"
        self.original, self.stat = self.file.read_bytes(), self.file.stat()

    def swap(self, content: bytes) -> None:
        """Other bytes under the same name and times."""
        self.file.write_bytes(content)
        os.utime(self.file, ns=(self.stat.st_atime_ns, self.stat.st_mtime_ns))

    async def cached(self, *, adapter: Path | None = None, salt: str = "", **config: Any) -> int:
        """Starts a server, asks the same prompt as always, stops it; cached tokens."""
        cache = {"paged_ssd_cache_dir": self.home / "cache", "adapter": adapter} | config
        async with running(self.model, self.home, **cache) as pool:
            asked: Request = replace(request(LENGTH), cache_salt=salt)
            await ask(await pool.get("tiny"), asked)
            return asked.stats.cached_tokens


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_weights_swapped_in_place_are_another_world(world):
    assert [await world.cached(), await world.cached()] == [0, LENGTH - 1]
    world.swap(make_tiny_model(world.home / "other", seed=1).joinpath("model.safetensors").read_bytes())
    assert world.file.stat().st_size == world.stat.st_size
    assert world.file.stat().st_mtime_ns == world.stat.st_mtime_ns
    assert [await world.cached(), await world.cached()] == [0, LENGTH - 1]
    world.swap(world.original)
    assert await world.cached() == LENGTH - 1


async def test_stored_dtype_and_block_size_are_parts_of_the_key(world):
    assert await world.cached() == 0
    save_file({name: array.astype(np.float16) for name, array in load_file(world.file).items()}, world.file)
    assert [await world.cached(), await world.cached()] == [0, LENGTH - 1]
    world.swap(world.original)
    assert [await world.cached(block_size=24), await world.cached(block_size=24)] == [0, LENGTH - 1]
    assert await world.cached() == LENGTH - 1


async def test_adapters_and_salts_have_worlds_of_their_own_even_under_one_name(world):
    one, other = make_adapter(world.home / "tenant"), make_adapter(world.home / "other", seed=1)
    assert await world.cached() == 0
    assert await world.cached(adapter=one) == 0
    assert await world.cached(salt="tenant") == 0
    assert await world.cached(adapter=other) == 0
    assert await world.cached(adapter=one, salt="tenant") == 0
    shutil.rmtree(one)
    other.rename(one)  # now under the first one's name
    assert await world.cached(adapter=one) == LENGTH - 1
    shutil.rmtree(one)
    make_adapter(one)
    for again in ({}, {"adapter": one}, {"salt": "tenant"}, {"adapter": one, "salt": "tenant"}):
        assert await world.cached(**again) == LENGTH - 1


async def test_the_served_name_does_not_change_with_an_adapter(world):
    async with running(world.model, world.home, adapter=make_adapter(world.home / "a")) as pool:
        assert [model.name for model in pool.models()] == ["tiny"]


def test_the_dtype_of_kv_is_a_part_of_the_key():
    def root(dtype: str) -> bytes:
        return CacheIdentity(b"f", CacheLayout((), (), (StatePart("0.keys", dtype, (1, 2, 1, 16)),)), "n").root(64, "")

    assert len({root(dtype) for dtype in ("F32", "F16", "BF16")}) == 3


# ---- the model's fingerprint


def weight_file(path: Path, tensors: dict[str, int]) -> None:
    """A weight file of float16 zeros, so many bytes of each."""
    at, header = 0, []
    for name, nbytes in tensors.items():
        header.append(f'"{name}":{{"dtype":"F16","shape":[{nbytes // 2}],"data_offsets":[{at},{at + nbytes}]}}')
        at += nbytes
    text = ("{" + ",".join(header) + "}").encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))


def test_two_files_are_not_one(tmp_path):
    """Bytes moved from one file to the next, or from the model to its adapter, change the fingerprint."""
    for name, files in {"a": [64, 32], "b": [32, 64], "c": [96]}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        for number, nbytes in enumerate(files):
            folder = tmp_path / f"{name}{number}"
            folder.mkdir()
            weight_file(folder / "model.safetensors", {f"t{number}": nbytes})
            (folder / "model.safetensors").rename(tmp_path / name / f"model{number}.safetensors")
    names = {fingerprint(tmp_path / name, read_weight_files(tmp_path / name)) for name in "abc"}
    assert len(names) == 3


# ---- hashes of tokens and of the root


@pytest.fixture(scope="module")
def runner() -> TinyRunner:
    return TinyRunner()


@pytest.mark.parametrize("exact", ["on", "off"])
def test_numpy_ids_and_python_ids_are_the_same_prompt(runner, exact):
    bench = Bench(runner, DictStore(), exact=exact)
    tokens = [(i * 7) % 250 for i in range(40)]
    bench.ask(tokens)
    for kind in (np.int64, np.uint32, np.int32, np.uint16):
        assert bench.prefix.probe([kind(t) for t in tokens]).cached_tokens == 39
    assert bench.prefix.probe(np.array(tokens)).cached_tokens == 39


@pytest.mark.parametrize("token", [-1, 2**32, 2**64, -(2**31), 1.0, "1", b"1", None, [1]])
def test_what_is_no_token_id_has_no_key(token):
    with pytest.raises(ValueError, match="token ids have to be integers"):
        pack_tokens([1, token, 3])


def test_ids_that_agree_in_their_low_bits_differ():
    """2^32 + 5 must not pass for 5, nor -1 for 2^32 - 1."""
    assert pack_tokens([5]) != pack_tokens([5 + (1 << 31)])
    for pair in ([5 + (1 << 32)], [-1]):
        with pytest.raises(ValueError):
            pack_tokens(pair)


def test_tokens_moved_between_blocks_or_into_the_parent_give_other_names():
    root = root_hash("m")
    a, b = pack_tokens([1, 2]), pack_tokens([3, 4])
    names = {
        block_hash(block_hash(root, a), b),
        block_hash(root, a + b),
        block_hash(block_hash(root, b), a),
        block_hash(block_hash(root, pack_tokens([1])), pack_tokens([2, 3, 4])),
        block_hash(root + a, b),
        block_hash(root, a, b),
        block_hash(root, b"", a + b),
        block_hash(root, pack_tokens([1, 2, 3, 4, 0])),
    }
    assert len(names) == 8


def test_a_salt_that_looks_like_other_fields_is_still_a_salt():
    layout = CacheLayout((), (), (StatePart("0.keys", "F32", (1, 2, 1, 16)),))
    identity = CacheIdentity(b"finger", layout, "n")
    salts = [
        "",
        " ",
        "64",
        "1",
        "finger",
        str(layout),
        "\0",
        "\0\0",
        "64\0",
        "s" * 500,
        "ü",
        "u\u0308",
        "None",
        "decoded",
    ]
    roots = [identity.root(size, salt) for salt in salts for size in (6, 64, 640)]
    roots += [replace(identity, fingerprint=b"finger" + salt.encode()).root(64, "") for salt in salts[1:]]
    roots += [replace(identity, fingerprint=b"").root(64, "finger")]
    assert len(set(roots)) == len(roots)


def test_numerics_are_no_part_of_the_name():
    layout = CacheLayout((), (), (StatePart("0.keys", "F32", (1, 2, 1, 16)),))
    assert CacheIdentity(b"f", layout, "here").root(64, "") == CacheIdentity(b"f", layout, "there").root(64, "")
