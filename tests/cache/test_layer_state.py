import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, ConcatenateKVCache, KVCache, RotatingKVCache

from omlx.arrays import ArrayPool, pack
from omlx.cache import layer_state
from omlx.cache.layer_state import KVSlabs, Uncacheable, describe, extract
from tests.tiny import TinyRunner


def filled(dtype: mx.Dtype, tokens: int = 50, layers: int = 2) -> list[KVCache]:
    caches = [KVCache() for _ in range(layers)]
    mx.random.seed(1)
    for cache in caches:
        cache.update_and_fetch(
            mx.random.normal((1, 2, tokens, 4)).astype(dtype), mx.random.normal((1, 2, tokens, 6)).astype(dtype)
        )
    layer_state.evaluate(caches)
    return caches


def test_the_layout_says_what_a_block_holds():
    layout = describe(filled(mx.bfloat16))
    assert [p.name for p in layout.parts] == ["0.keys", "0.values", "1.keys", "1.values"]
    assert layout.specs(16)[1] == ("0.values", "BF16", (1, 2, 16, 6))
    assert layout.bytes_per_token == 2 * 2 * (4 + 6) * 2
    assert str(layout) != str(describe(filled(mx.float16))) != str(describe(filled(mx.float16, layers=1)))


def test_a_layer_of_an_unknown_class_makes_the_model_uncacheable():
    answer = describe([*filled(mx.float32), ConcatenateKVCache()])
    assert isinstance(answer, Uncacheable) and "layer 2" in answer.reason and "ConcatenateKVCache" in answer.reason


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_cut_into_blocks_and_joined_again(dtype):
    caches = filled(dtype)
    layout = describe(caches)
    slabs = KVSlabs(layout, 64)
    for start, stop, take in ((0, 16, 16), (16, 32, 16), (32, 50, 7)):
        slabs.target(start, take, stop - start).copy_from(extract(layout, caches, start, stop))
    joined = slabs.caches(39)
    for old, new in zip(caches, joined, strict=True):
        assert new.offset == 39 and new.keys.shape[2] == 64 and new.keys.dtype == dtype
        assert mx.array_equal(old.keys[:, :, :39], new.keys[:, :, :39])
        assert mx.array_equal(old.values[:, :, :39], new.values[:, :, :39])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_pieces_take_a_files_payload_and_a_part_of_a_block_has_none(dtype):
    caches = filled(dtype)
    layout = describe(caches)
    block = extract(layout, caches, 16, 32)
    slabs = KVSlabs(layout, 48)
    pieces = slabs.target(16, 16, 16).pieces()
    assert pieces is not None and sum(p.nbytes for p in pieces) == block.nbytes
    payload, at = memoryview(block.data), 0
    for piece in pieces:
        piece[:] = payload[at : at + piece.nbytes]
        at += piece.nbytes
    assert slabs.target(0, 5, 16).pieces() is None
    del pieces, piece
    (first, _) = slabs.caches(32)
    assert mx.array_equal(first.keys[:, :, 16:32], caches[0].keys[:, :, 16:32])


def test_a_block_does_not_change_when_its_cache_does():
    caches = filled(mx.float32)
    layout = describe(caches)
    block = extract(layout, caches, 0, 16)
    before = block.data.copy()
    caches[0].keys[:] = 0
    caches[0].update_and_fetch(mx.ones((1, 2, 3, 4)), mx.ones((1, 2, 3, 6)))
    layer_state.evaluate(caches)
    assert np.array_equal(block.data, before)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("dim", [8, 2000], ids=["small parts", "large parts"])
def test_copying_bytes_gives_what_copying_arrays_gives(dtype, dim):
    caches = [KVCache() for _ in range(2)]
    for cache in caches:
        cache.update_and_fetch(*(mx.random.normal((1, 3, 50, width)).astype(dtype) for width in (dim, dim + 1)))
    layer_state.evaluate(caches)
    layout = describe(caches)
    block = extract(layout, caches, 7, 39)
    plain = pack([(cache.keys[:, :, 7:39], cache.values[:, :, 7:39]) for cache in caches])
    assert np.array_equal(block.data, plain.data)
    for take in (32, 5):
        slabs = KVSlabs(layout, 64)
        slabs.target(16, take, 32).copy_from(block)
        for cache, restored in zip(caches, slabs.caches(16 + take), strict=True):
            assert mx.array_equal(cache.keys[:, :, 7 : 7 + take], restored.keys[:, :, 16 : 16 + take])
            assert mx.array_equal(cache.values[:, :, 7 : 7 + take], restored.values[:, :, 16 : 16 + take])
            assert not mx.any(restored.keys[:, :, :16]).item() and not mx.any(restored.keys[:, :, 16 + take :]).item()


def test_arrays_that_are_not_contiguous_are_cut_as_well():
    caches = filled(mx.bfloat16)
    layout = describe(caches)
    expected = extract(layout, caches, 7, 20).data
    caches[0].keys = mx.contiguous(caches[0].keys.swapaxes(1, 2)).swapaxes(1, 2)
    layer_state.evaluate(caches)
    assert np.array_equal(extract(layout, caches, 7, 20).data, expected)


def test_extracting_leaves_no_view_that_would_make_updates_copy():
    caches = filled(mx.float32, tokens=100)
    layout = describe(caches)
    address = np.asarray(caches[0].keys).__array_interface__["data"][0]
    extract(layout, caches, 0, 64)
    caches[0].update_and_fetch(mx.ones((1, 2, 1, 4)), mx.ones((1, 2, 1, 6)))
    layer_state.evaluate(caches)
    assert np.asarray(caches[0].keys).__array_interface__["data"][0] == address


def test_restored_caches_continue_like_the_originals():
    runner = TinyRunner()
    caches = runner.new_cache()
    runner.prefill(list(range(40)), caches)
    slabs = KVSlabs(runner.layout, 64)
    slabs.target(0, 40, 40).copy_from(extract(runner.layout, caches, 0, 40))
    assert mx.array_equal(runner.logits(7, slabs.caches(40)), runner.logits(7, caches))


def place(array: mx.array) -> int:
    return np.asarray(array).__array_interface__["data"][0]


def test_restored_caches_are_updated_in_place_also_in_recycled_memory():
    runner = TinyRunner()
    caches = runner.new_cache()
    runner.prefill(list(range(40)), caches)
    expected = runner.logits(7, caches)
    block = extract(runner.layout, caches, 0, 40)
    pool = ArrayPool(1 << 30)
    places = set()
    for _ in range(3):
        slabs = KVSlabs(runner.layout, 64, pool)
        slabs.target(0, 40, 40).copy_from(block)
        restored = slabs.caches(40)
        before = [place(cache.keys) for cache in restored]
        assert mx.array_equal(expected, runner.logits(7, restored))
        assert [place(cache.keys) for cache in restored] == before
        places.update(before)
        del slabs, restored
    assert len(places) == len(caches)


@pytest.mark.parametrize("cls", [KVCache, RotatingKVCache, ChunkedKVCache])
def test_classes_of_mlx_vlm_are_known_by_their_names(cls):
    twin = type(cls.__name__, (cls,), {"__module__": "mlx_vlm.models.cache"})
    listed = type("CacheList", (CacheList,), {"__module__": "mlx_vlm.models.cache"})
    made = twin() if cls is KVCache else twin(8)
    caches = [listed(made, twin() if cls is KVCache else twin(8))]
    for cache in caches[0].caches:
        cache.update_and_fetch(mx.ones((1, 2, 5, 4)), mx.ones((1, 2, 5, 4)))
    layout = describe(caches)
    assert layout.layers[0].cls is twin and layout == describe(caches)
    (built,) = KVSlabs(layout, 5, end=5).caches(5)
    assert type(built) is listed and [type(cache) for cache in built.caches] == [twin, twin]
    stranger = type("OtherKVCache", (cls,), {"__module__": "mlx_vlm.models.cache"})
    assert isinstance(describe([stranger() if cls is KVCache else stranger(8)]), Uncacheable)


def test_a_state_with_an_empty_part_makes_the_model_uncacheable():
    cache = ArraysCache(2)
    cache[0] = mx.ones((1, 3))
    assert describe([cache]) == Uncacheable("layer 0 leaves a part of its recurrent state empty")


def test_layers_that_read_anothers_keys_keep_nothing():
    caches = [*filled(mx.float32), KVCache()]
    layout = describe(caches)
    assert [part.name for part in layout.parts] == ["0.keys", "0.values", "1.keys", "1.values"]
    rebuilt = KVSlabs(layout, 16).caches(16)
    assert rebuilt[2].keys is None and rebuilt[2].offset == 0


def test_settling_leaves_a_ring_in_order_alone():
    ring = RotatingKVCache(8)
    ring.update_and_fetch(mx.ones((1, 2, 6, 4)), mx.ones((1, 2, 6, 4)))
    layer_state.settle([ring])
    keys = ring.keys
    layer_state.settle([ring])
    assert ring.keys is keys
