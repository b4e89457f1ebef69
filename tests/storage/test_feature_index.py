import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omlx.storage.feature_file import FeatureKey, feature_file_size, feature_model_name, served_model
from omlx.storage.feature_index import Entry, FeatureIndex
from omlx.storage.tensor_file import BlockBuffer, TensorSpec

SPEC = TensorSpec("features", "U8", (100,))
KEYS = [FeatureKey(f"h{n}", model) for n in range(3) for model in ("a", "b")]


def block() -> BlockBuffer:
    return BlockBuffer((SPEC,), np.zeros(100, np.uint8))


def sums(entries: list[Entry]) -> tuple[int, int]:
    there = [entry for entry in entries if entry.file_bytes or entry.pending]
    return len(there), sum(feature_file_size(e.key, SPEC) if e.pending is not None else e.file_bytes for e in there)


@given(st.lists(st.tuples(st.sampled_from(["put", "queue", "write", "remove", "touch"]), st.integers(0, 5))))
def test_sums_are_always_those_of_the_entries(steps):
    index = FeatureIndex()
    for number, (what, which) in enumerate(steps):
        key = KEYS[which]
        entry = index.get(key)
        if what == "put":
            index.put(Entry(key, 10 * number))
        elif what == "queue":
            index.put(Entry(key, entry.file_bytes if entry else 0, block()))
        elif what == "remove":
            index.remove(key)
        elif entry is not None and what == "write":
            with index.changing(entry):
                entry.file_bytes, entry.pending = 7 + number, None
        elif entry is not None:
            index.touch(entry)
        entries = list(index)
        assert index.file_bytes == sum(e.file_bytes for e in entries) and index.usage() == sums(entries)
        for model in ("a", "b"):
            assert index.usage(model) == sums([e for e in entries if e.key.model_name == model])


def test_entries_are_in_the_order_of_use():
    index = FeatureIndex()
    entries = [Entry(key, 1) for key in KEYS[:3]]
    for entry in entries:
        index.put(entry)
    index.touch(entries[0])
    index.make_first(entries[2])
    assert list(index) == [entries[2], entries[1], entries[0]]
    again = Entry(KEYS[1], 1)
    index.put(again)
    assert list(index)[-1] is again and index.holds(again) and not index.holds(entries[1])


NAMES = st.one_of(
    st.text(max_size=40), st.sampled_from(["m", "m-0123456789abcdef", "m-0123456789abcdef.0123456789abcdef", "a-b.c"])
)


@given(NAMES, st.binary(min_size=1, max_size=32), st.one_of(st.none(), st.text()))
def test_a_models_name_can_be_read_back_from_that_of_its_features(name, fingerprint, numerics):
    assert served_model(feature_model_name(name, fingerprint, numerics)) == name


def test_other_weights_and_other_numerics_have_other_names():
    made = {feature_model_name("m", bytes([n]) * 32, numerics) for n in range(3) for numerics in (None, "a", "b")}
    assert len(made) == 9 and feature_model_name("m", b"\xab" * 32) == "m-abababababababab"
    assert served_model("clip_vit_large") == "clip_vit_large"
