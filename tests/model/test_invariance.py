"""Equal bits wherever prefill is cut: the attention, the products, and which models they suffice for."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import base, llama

from omlx.cache import layer_state
from omlx.model import invariance
from omlx.model.invariance import KEY_BLOCK, InvariantPasses, attention
from tests.families import zoo
from tests.families.test_families import prompt
from tests.tiny import tiny_model

CPU = mx.default_device().type == mx.DeviceType.cpu
cpu_only = pytest.mark.skipif(not CPU, reason="promised for the CPU only")

# Families whose layers give other bits for other chunks, or use attention of their own.
CUT_ON_THE_GRID = {"mamba2", "falcon_h1", "granitemoehybrid", "deepseek_v3", "gemma2", "phi3small", "plamo3"}


@pytest.fixture(autouse=True, scope="module")
def no_compiler() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


def draw(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


@cpu_only
@pytest.mark.parametrize("family", [*zoo.CONFIGS, *zoo.UNEVEN])
def test_a_prompt_may_be_cut_anywhere(family: str) -> None:
    runner = zoo.runner(family)
    assert runner.cut_anywhere == (family not in CUT_ON_THE_GRID)
    if not runner.cut_anywhere:
        return
    text = prompt(2 * KEY_BLOCK + 90)
    whole = logits(runner, text, [len(text)])
    cuts = [37, KEY_BLOCK - 1, KEY_BLOCK, KEY_BLOCK + 1, 2 * KEY_BLOCK + 3, len(text) - 2, len(text) - 1, len(text)]
    assert np.array_equal(logits(runner, text, cuts), whole)


def test_quantised_caches_stay_on_the_grid() -> None:
    """Their attention sums over all keys at once, which a few tokens would not show."""
    assert not zoo.runner("llama", kv_bits=8, wide=True).cut_anywhere


def logits(runner: Any, text: list[int], ends: list[int]) -> Any:
    caches, start, found = runner.new_cache(), 0, []
    for end in ends:
        found.append(np.array(runner.prefill_logits(text[start:end], caches)))
        start = end
    return np.concatenate(found)


MASKS = ["none", "causal", "window", "added", "heads"]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", [1, 7, 300])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_agrees_with_the_stock_one(mask: str, length: int, sinks: bool) -> None:
    count, heads, groups, dims = KEY_BLOCK + 300, 6, 2, 16
    queries, keys = draw(2, heads, length, dims), draw(2, groups, count, dims, seed=1)
    values = draw(2, groups, count, 24)
    positions = mx.arange(count - length, count)[:, None]
    near = (mx.arange(count) <= positions) & (mx.arange(count) > positions - 50)
    given: Any = {
        "none": None,
        "causal": "causal",
        "window": near,
        "added": mx.where(near, 0.5, -mx.inf)[None, None],
        "heads": mx.broadcast_to(near, (2, heads, length, count)),
    }[mask]
    sink = draw(heads, seed=2) if sinks else None
    ours = attention(queries, keys, values, None, 0.25, given, sink)
    stock = base.scaled_dot_product_attention(queries, keys, values, None, 0.25, given, sinks=sink)
    assert ours.shape == stock.shape
    assert mx.abs(ours - stock).max().item() < 1e-5


@cpu_only
@pytest.mark.parametrize(("inner", "columns"), [(32, 4), (64, 1), (576, 64), (1024, 16), (2048, 256)])
def test_a_product_has_the_same_bits_for_any_number_of_rows(inner: int, columns: int) -> None:
    rows, matrix = draw(700, inner), draw(columns, inner, seed=1)
    whole = np.array(invariance.matmul(rows, matrix.T))
    bias = draw(columns, seed=2)
    added = np.array(invariance.addmm(bias, rows, matrix.T))
    for count in (1, 2, 7, 33, 300):
        assert np.array_equal(np.array(invariance.matmul(rows[:count], matrix.T)), whole[:count])
        assert np.array_equal(np.array(invariance.addmm(bias, rows[None, :count], matrix.T))[0], added[:count])
    assert np.allclose(whole, np.array(rows @ matrix.T), atol=1e-3)
    assert np.allclose(added, np.array(mx.addmm(bias, rows, matrix.T)), atol=1e-3)


@cpu_only
def test_experts_have_the_same_bits_for_few_tokens_and_for_many() -> None:
    experts, rows = draw(4, 16, 32), draw(90, 1, 1, 32, seed=1)
    chosen = mx.array(np.random.default_rng(0).integers(0, 4, (90, 2)).astype(np.uint32))
    whole = np.array(invariance.gather_mm(rows, experts.swapaxes(-1, -2), rhs_indices=chosen))
    assert whole.shape == (90, 2, 1, 16)
    for count in (1, 2, 31):
        part = invariance.gather_mm(rows[:count], experts.swapaxes(-1, -2), rhs_indices=chosen[:count])
        assert np.array_equal(np.array(part), whole[:count])
    order = mx.argsort(chosen.flatten())
    taken = rows.reshape(90, 1, 32)[order // 2]
    by_expert = invariance.gather_mm(
        taken, experts.swapaxes(-1, -2), rhs_indices=chosen.flatten()[order], sorted_indices=True
    )
    assert np.array_equal(np.array(by_expert)[np.array(mx.argsort(order))].reshape(whole.shape), whole)


def test_functions_are_replaced_only_while_a_pass_is_built() -> None:
    model = tiny_model()
    passes = InvariantPasses(model)
    before = (mx.matmul, mx.addmm, mx.gather_mm, mx.array.__matmul__, llama.scaled_dot_product_attention)
    with passes.building():
        assert mx.matmul is invariance.matmul
        model(mx.array([[1, 2]]), cache=layer_state.new_cache(model))
    with pytest.raises(ValueError, match="Cannot index"), passes.building():
        model("no tokens")
    assert before == (mx.matmul, mx.addmm, mx.gather_mm, mx.array.__matmul__, llama.scaled_dot_product_attention)
    assert passes.attentions == 2
