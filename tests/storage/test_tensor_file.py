import json
import os

import mlx.core as mx
import numpy as np
import pytest

from omlx.storage.tensor_file import (
    ALIGNMENT,
    BlockBuffer,
    BlockMeta,
    DamagedBlock,
    TensorSpec,
    UnknownFormat,
    build_header,
    read_block_file,
    read_header,
    read_into,
    with_size,
    write_block_file,
)
from tests.storage.blocks import DAMAGES, NBYTES, SPECS, block, damage, meta, name, same, write

MIXED = (
    TensorSpec("0.keys", "BF16", (1, 2, 3, 4)),
    TensorSpec('1.ä"b', "U32", (5,)),
    TensorSpec("2.scalar", "F16", ()),
    TensorSpec("3.empty", "F32", (0, 7)),
)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / f"{name(1).hex()}.safetensors"
    write(path, 1, parent=name(0), cuts=(3, 8), numerics='cpü "x"', start=64, exact_tokens=5)
    return path


META = meta(1, parent=name(0), cuts=(3, 8), numerics='cpü "x"', start=64, exact_tokens=5)


def test_a_file_gives_back_its_block_and_says_the_same_of_itself(path):
    assert read_header(path) == (SPECS, META)
    assert path.stat().st_size == META.file_size
    assert same(read_block_file(path, META), block(1))
    assert os.listdir(path.parent) == [path.name]


def test_plain_mx_load_reads_the_file(path):
    arrays, metadata = mx.load(str(path), return_metadata=True)
    for index, spec in enumerate(SPECS):
        assert np.array_equal(np.asarray(arrays[spec.name].view(mx.uint32)), block(1).tensor(index).view(np.uint32))
    assert metadata["hash"] == name(1).hex() and metadata["format"] == "1"
    assert int(metadata["file_length"]) == path.stat().st_size


def test_the_payload_begins_at_a_multiple_of_64_and_the_checksum_has_a_fixed_place(path):
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little") + 8
    assert size % ALIGNMENT == 0 and raw[size:] == block(1).data.tobytes()
    assert next(iter(json.loads(raw[8:size]))) == "__metadata__"
    assert raw[8:].startswith(b'{"__metadata__":{"checksum":"') and raw[37:69].isalnum()


def test_mixed_dtypes_and_shapes_survive(tmp_path):
    mixed = block(3, MIXED)
    known = with_size(MIXED, BlockMeta(block_hash=b"x", token_count=3))
    write_block_file(tmp_path / "m", mixed, known)
    assert read_header(tmp_path / "m") == (MIXED, known)
    assert same(read_block_file(tmp_path / "m", known), mixed)
    assert mx.load(str(tmp_path / "m"), format="safetensors")["0.keys"].dtype == mx.bfloat16


@pytest.mark.parametrize("size", [1, 7, 512, 4096, NBYTES])
def test_a_block_is_read_into_pieces_of_any_size(path, size):
    target = np.zeros(NBYTES, np.uint8)
    pieces = [memoryview(target)[at : at + size] for at in range(0, NBYTES, size)]
    read_into(path, SPECS, META, pieces)
    assert np.array_equal(target, block(1).data)


def test_large_blocks_are_read_in_several_steps(tmp_path):
    specs = (TensorSpec("a", "U8", (5_000_001,)), TensorSpec("b", "U8", (3,)))
    big = block(9, specs)
    known = with_size(specs, BlockMeta(block_hash=b"big", token_count=1))
    write_block_file(tmp_path / "big", big, known)
    assert same(read_block_file(tmp_path / "big", known), big)


def test_short_reads_and_writes_are_continued(path, tmp_path, monkeypatch):
    preadv, writev = os.preadv, os.writev
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:100]], at))
    monkeypatch.setattr(os, "writev", lambda fd, views: writev(fd, [views[0][:100]]))
    assert same(read_block_file(path, META), block(1))
    write_block_file(tmp_path / "slow", block(1), META)
    assert (tmp_path / "slow").read_bytes() == path.read_bytes()


def test_pieces_of_another_size_are_the_callers_error(path):
    with pytest.raises(ValueError, match=str(NBYTES)):
        read_into(path, SPECS, META, [memoryview(bytearray(NBYTES - 1))])


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_refused(path, how):
    damage(path, how)
    with pytest.raises(DamagedBlock):
        read_into(path, SPECS, META, [memoryview(bytearray(NBYTES))])
    with pytest.raises(DamagedBlock):
        read_block_file(path, META)


def test_every_single_bit_counts(path):
    raw = path.read_bytes()
    for at in [*range(0, META.file_size, 97), META.file_size - 1]:
        for bit in (0, 7):
            changed = bytearray(raw)
            changed[at] ^= 1 << bit
            path.write_bytes(changed)
            with pytest.raises(DamagedBlock):
                read_into(path, SPECS, META, [memoryview(bytearray(NBYTES))])


def test_a_file_of_another_block_or_with_other_metadata_is_refused(path):
    for other in (meta(2), meta(1), meta(1, parent=name(0), cuts=(3, 8), numerics="other", start=64, exact_tokens=5)):
        with pytest.raises(DamagedBlock):
            read_block_file(path, other)
    specs = tuple(spec._replace(dtype="I32") for spec in SPECS)
    with pytest.raises(DamagedBlock):
        read_into(path, specs, META, [memoryview(bytearray(NBYTES))])


def test_another_format_is_told_apart_from_damage(path):
    path.write_bytes(path.read_bytes().replace(b'"format":"1"', b'"format":"2"'))
    with pytest.raises(UnknownFormat, match="2"):
        read_header(path)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"{}",
        b'{"__metadata__":{}}',
        b'{"__metadata__":1}',
        b"[" * 100_000,
        b'{"__metadata__":{"format":"1"}}',
    ],
)
def test_a_header_that_is_not_ours_is_refused(tmp_path, header):
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(DamagedBlock):
        read_header(tmp_path / "x")


def test_a_folder_or_a_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for there in (tmp_path, tmp_path / "pipe"):
        with pytest.raises((DamagedBlock, OSError)):
            read_into(there, SPECS, META, [memoryview(bytearray(NBYTES))])
        with pytest.raises((DamagedBlock, OSError)):
            read_header(there)


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(fd, views):
        raise OSError(28, "no space")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="no space"):
        write_block_file(tmp_path / "x", block(1), META)
    assert os.listdir(tmp_path) == []


def test_specs_that_make_no_file_are_refused():
    for specs in (
        (TensorSpec("a", "F32", (1,)), TensorSpec("a", "F32", (2,))),
        (TensorSpec("a", "F33", (1,)),),
        (TensorSpec("a", "F32", (-1, -1)),),
        (TensorSpec("__metadata__", "F32", (1,)),),
    ):
        with pytest.raises(ValueError):
            build_header(specs, META)
    with pytest.raises(ValueError):
        BlockBuffer(SPECS, np.zeros(3, np.uint8))
