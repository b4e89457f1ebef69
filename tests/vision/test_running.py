"""Prompts with pictures through the scheduler over a real cache: the same bits from wherever, beside each other."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.cache.vision_feature_cache import VisionFeatureSSDCache
from omlx.errors import EngineError
from omlx.model.vlm_runner import VLMRunner
from tests.dict_store import DictStore
from tests.vision.models import FAMILIES, MROPE, Part, Prompt, VisionBench, loaded
from tests.vision.pictures import Shown, noise

A, B, C = noise(1), noise(2, 64, 33), noise(3, 32, 64)
STORY = "Once upon a time there was a painter who painted the same square again and again. "
QUESTIONS: list[tuple[Part | Prompt, ...]] = [
    ([A, "What is this?"],),
    ([STORY, B, " and ", A, STORY],),
    ([C, STORY], "A square.", [A, C, "And these?"]),
    ("Just words. " + STORY,),
]
ONE_OF_EACH = ("idefics3", "qwen2_5_vl", "gemma3")  # plain positions, mrope, windows


def open_store(root: Path) -> PagedSSDCacheManager:
    return PagedSSDCacheManager(root / "m", 1 << 28, 1 << 26, root_dir=root)


def open_features(root: Path) -> VisionFeatureSSDCache:
    return VisionFeatureSSDCache(root / "vision")


@pytest.fixture
def features() -> Iterator[VisionFeatureSSDCache]:
    cache = VisionFeatureSSDCache(None)
    yield cache
    cache.close(1)


def cold(family: str, *turns: Part | Prompt, **options: Any) -> list[tuple[Any, ...]]:
    """The answer of a server that never saw anything."""
    fresh = VisionBench(family, DictStore())
    return fresh.answer(fresh.see(*turns, cache=False, **options))


def words(answer: list[tuple[Any, ...]]) -> list[int]:
    return [token for token, *_ in answer]


def assert_close(a: list[tuple[Any, ...]], b: list[tuple[Any, ...]]) -> None:
    """Equal tokens, log-probabilities within 1e-3."""
    assert [x[:2] for x in a] == [x[:2] for x in b]
    assert all(abs(x[2] - y[2]) <= 1e-3 for x, y in zip(a, b, strict=True))


# ---- the same bits


@pytest.mark.parametrize("family", FAMILIES)
def test_cold_ram_ssd_and_restart_are_equal_to_the_last_bit(family: str, tmp_path: Path) -> None:
    store, kept = open_store(tmp_path), open_features(tmp_path)
    bench = VisionBench(family, store, kept)
    answers = [cold(family, *turns) for turns in QUESTIONS]
    assert [bench.answer(bench.see(*turns)) for turns in QUESTIONS] == answers
    repeat(bench, answers, "ram")
    assert store.flush(60)
    store.evict_from_ram(1 << 30)
    repeat(bench, answers, "ssd")
    assert bench.encoded == 3  # each picture once, whatever was asked
    assert store.flush(60) and store.check() == [] and store.close(60) and kept.close(60)
    store, kept = open_store(tmp_path), open_features(tmp_path)
    bench = VisionBench(family, store, kept)
    repeat(bench, answers, "ssd")
    assert bench.encoded == 0 and bench.engine.vision_stats.vision_feature_hits == 0
    store.clear()
    for turns, answer in zip(QUESTIONS, answers, strict=True):  # the features alone are left
        assert bench.answer(bench.see(*turns)) == answer
    assert bench.encoded == 0 and bench.engine.vision_stats.vision_feature_hits >= 3
    store.close(60)
    kept.close(60)


def repeat(bench: VisionBench, answers: list[Any], tier: str) -> None:
    for turns, answer in zip(QUESTIONS, answers, strict=True):
        request = bench.see(*turns)
        assert bench.answer(request) == answer
        stats = request.stats
        found = {"ram": stats.cached_ram_tokens, "ssd": stats.cached_ssd_tokens}
        assert found.pop(tier) == len(request.prompt) - 1 and not any(found.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("exact", ["on", "strict", "off"])
def test_a_second_turn_about_a_picture_computes_only_what_is_new(family: str, exact: str) -> None:
    bench = VisionBench(family, DictStore(), exact=exact)
    first = bench.see([STORY, A, "What is this?"], max_tokens=9)
    said = bytes(token for token in bench.tokens(first) if token < 128).decode()  # tokens below 256 are bytes
    turns = ([STORY, A, "What is this?"], said, ["And ", B, "?"])
    request = bench.see(*turns)
    assert_close(bench.answer(request), cold(family, *turns))
    reused = request.stats.cached_tokens
    assert (len(first.prompt) - 1) // 16 * 16 <= reused <= len(first.prompt) + 9
    assert bench.encoded == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_another_picture_changes_what_the_model_sees(family: str) -> None:
    """Of the same size, so that all tokens are the same; what stands in front of it is shared."""
    other = noise(9)
    bench = VisionBench(family, DictStore(), exact="off")
    turns = ([STORY, A, "What is this?"],), ([STORY, other, "What is this?"],)
    first, second = bench.see(*turns[0]), bench.see(*turns[1])
    assert first.prompt == second.prompt and first.vision.keys != second.vision.keys
    assert bench.answer(first) != bench.answer(second)
    assert second.stats.cached_tokens == first.vision.starts[0].position
    for turn, request in zip(turns, (first, second), strict=True):
        assert_close(bench.answer(request), cold(family, *turn))


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_pictures_in_another_order_are_other_prompts(family: str) -> None:
    bench = VisionBench(family, DictStore())
    for turn in ([A, "x"], [B, "x"], [A, B, "x"], [B, A, "x"], [A, B, "x"]):
        assert bench.answer(bench.see(turn)) == cold(family, turn)


# ---- what the encoder does


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_a_picture_shown_twice_in_a_prompt_is_encoded_once(family: str) -> None:
    bench = VisionBench(family, DictStore())
    again = Shown(A.image.copy(), [])  # the same pixels
    request = bench.see([A, again, STORY, A, "Which?"])
    assert bench.encoded == 1 and request.vision.encoded == 1
    assert bench.answer(request) == cold(family, [A, A, STORY, A, "Which?"])


@pytest.mark.parametrize("caches", [(True, True), (True, False), (False, True), (False, False)])
def test_a_picture_shown_by_two_requests_at_once_is_encoded_once(
    features: VisionFeatureSSDCache, caches: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And stored if one of them uses the cache."""
    monkeypatch.setattr("omlx.engine.vlm._PIECE_S", 0.0)  # one layer at a time, so that the second finds it under way
    bench = VisionBench("idefics3", DictStore(), features)
    texts = ("First. ", "Now another question about it. ")
    pair = [bench.show([text, A, STORY], cache=cache) for text, cache in zip(texts, caches, strict=True)]
    bench.run()
    assert bench.failures == {} and bench.encoded == 1
    assert features.usage.ram_entries == any(caches)
    assert sorted((request.vision.encoded, request.vision.reused) for request in pair) == [(0, 1), (1, 0)]
    for request, text in zip(pair, ("First. ", "Now another question about it. "), strict=True):
        assert words(bench.answer(request)) == words(cold("idefics3", [text, A, STORY]))


def test_several_answers_to_a_prompt_each_have_its_pictures() -> None:
    bench = VisionBench("qwen3_vl", DictStore())
    first = bench.show([A, STORY, B, "What is this?"], cache=False)
    others = [bench.add(first.prompt, vision=first.vision.again(), cache=False, max_tokens=6) for _ in range(2)]
    one, two = others[0].vision, others[1].vision
    while not all(vision.prepare(0, len(first.prompt), 1.0) for vision in (one, two)):
        pass
    one.release()
    assert len(two.chunk(0, len(first.prompt)).at) == sum(key >= 1 << 31 for key in two.keys)
    bench.run()
    assert bench.failures == {}
    expected = words(cold("qwen3_vl", [A, STORY, B, "What is this?"]))
    assert [words(bench.answer(request)) for request in (first, *others)] == [expected] * 3


def test_nothing_is_decoded_or_encoded_for_a_prompt_whose_state_is_stored() -> None:
    bench = VisionBench("idefics3", DictStore())
    bench.see([A, "What is this?"])
    again = Shown(A.image.copy(), [])
    request = bench.see([again, "What is this?"])
    assert bench.encoded == 1 and again.decoded == [] and request.vision.encoded == request.vision.reused == 0


def test_stored_features_spare_the_encoder_when_the_state_is_gone(features: VisionFeatureSSDCache) -> None:
    first = VisionBench("qwen3_vl", DictStore(), features)
    answer = first.answer(first.see([A, "What is this?"]))
    bench, again = VisionBench("qwen3_vl", DictStore(), features), Shown(A.image.copy(), [])
    request = bench.see([again, "What is this?"])
    assert bench.answer(request) == answer
    assert bench.encoded == 0 and again.decoded == [] and request.vision.reused == 1
    assert bench.engine.figures["vision_feature_hits"] == 1


def test_a_picture_costs_what_the_encoder_took_for_others_unless_its_features_are_stored(
    features: VisionFeatureSSDCache,
) -> None:
    bench = VisionBench("idefics3", DictStore(), features)
    first = bench.show([STORY, A, "x"])
    assert first.vision.encoder_costs() == []  # nothing is known yet
    bench.run()
    second = bench.show([B, STORY, A, " and ", B, "x"])
    ((end, seconds),) = second.vision.encoder_costs()  # those of A are stored
    of_a, both = ([at for at, key in enumerate(r.vision.keys) if key >= 1 << 31] for r in (first, second))
    assert end == both[-1] + 1
    each = bench.engine.vision_stats.vision_encoder_s / len(of_a)
    assert seconds == pytest.approx(each * (len(both) - len(of_a)) / 2)


def test_stored_features_that_do_not_fit_the_model_are_a_miss(features: VisionFeatureSSDCache) -> None:
    bench = VisionBench("gemma3", DictStore(), features)
    for words, wrong in (("Look: ", mx.zeros((3, 64))), ("And now: ", mx.zeros((16, 64), mx.float16))):
        request = bench.show([words, A, "What is this?"])  # with other words before it the picture is needed again
        key = request.vision.starts[0].digest.hex()
        features.put(key, "tiny", wrong)
        bench.run()
        assert bench.answer(request) == cold("gemma3", [words, A, "What is this?"])
    assert bench.encoded == 2 and features.get(key, "tiny").shape == (16, 64)
    bench.see(["Once more: ", A, "What is this?"])
    assert bench.encoded == 2


def test_tenants_share_no_features(features: VisionFeatureSSDCache) -> None:
    bench = VisionBench("gemma3", DictStore(), features)
    for salt in ("one", "two", "one", ""):
        content = [{"type": "image"}, {"type": "text", "text": "x"}]
        tokens, vision = bench.engine.vision.prompt([{"role": "user", "content": content}], {}, [A], salt=salt)
        bench.add(tokens, vision=vision, cache=False)
        bench.run()
    assert bench.encoded == 3 and bench.failures == {}


def test_features_are_kept_no_longer_than_they_are_needed() -> None:
    bench = VisionBench("idefics3", DictStore())
    request = bench.show([A, STORY * 3, B, "x"])
    held = []
    while bench.scheduler.has_work:
        bench.scheduler.step()
        held.append((len(request.vision._features), len(bench.engine._encodings)))
    assert max(held) == (1, 1) and held[-1] == (0, 0)
    assert bench.encoded == 2


# ---- beside others


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_of_several_sizes_and_texts_decode_at_once(family: str) -> None:
    """Each row at its own rope positions; cold, and then all of them restored."""
    turns: list[Part | Prompt] = [[A, "What is this?"], [STORY, C, "And this?"], "Only words?", [B, A, "Which?"]]
    alone = [words(cold(family, turn, max_tokens=12)) for turn in turns]
    bench = VisionBench(family, DictStore())
    for _ in range(2):
        requests = [bench.show(turn, max_tokens=12) for turn in turns]
        bench.run()
        assert bench.failures == {}
        assert [words(bench.answer(request)) for request in requests] == alone
    assert all(request.stats.cached_tokens == len(request.prompt) - 1 for request in requests)


@pytest.mark.parametrize("family", MROPE)
def test_rope_positions_matter_to_these_answers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would not notice a wrong delta if answers did not depend on it."""
    bench = VisionBench(family, DictStore())
    request = bench.show([B, C, "What is this?"], max_tokens=12)
    assert request.vision.rope_delta < -10
    right = cold(family, [B, C, "What is this?"], max_tokens=12)
    request.vision.rope_delta = 0
    bench.run()
    assert bench.answer(request) != right


class Slow(Shown):
    """Its pixels are there when `gate` opens."""

    gate = threading.Event()

    def rgb(self) -> Any:
        assert self.gate.wait(60)
        return super().rgb()


def slow(seed: int) -> Slow:
    Slow.gate = threading.Event()
    return Slow(noise(seed, 64, 64).image, [])


def test_streams_go_on_while_a_picture_is_resized_and_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = VisionBench("idefics3", DictStore())
    monkeypatch.setattr("omlx.engine.vlm._PIECE_S", 0.0)  # one layer at a time
    text = bench.show("Tell me.", max_tokens=200)
    until(bench, lambda: text.request_id in bench.outputs)
    request = bench.show([slow(5), "What is this?"])
    said = len(bench.tokens(text))
    for _ in range(20):
        bench.scheduler.step()
    assert len(bench.tokens(text)) == said + 20 and request.request_id not in bench.outputs
    Slow.gate.set()
    while bench.encoded == 0:
        bench.scheduler.step()
    waited = len(bench.tokens(text)) - said - 20
    assert waited >= loaded("idefics3").loaded.config["vision_config"]["num_hidden_layers"]
    bench.run()
    assert bench.failures == {}
    assert words(bench.answer(request)) == words(cold("idefics3", [noise(5, 64, 64), "What is this?"]))


def test_a_longer_prompt_goes_on_while_a_shorter_one_waits_for_its_picture() -> None:
    bench = VisionBench("idefics3", DictStore())
    request, text = bench.show([slow(6), "What is this?"]), bench.show(STORY * 10)
    until(bench, lambda: text.request_id in bench.outputs)
    assert request.request_id not in bench.outputs
    Slow.gate.set()
    bench.run()
    assert bench.failures == {} and bench.encoded == 1


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_a_paused_request_goes_on_with_its_picture(family: str) -> None:
    """Its answer so far is prefilled again, behind the picture's positions; with and without a cache."""
    for cache in (True, False):
        bench = VisionBench(family, DictStore())
        pair = [bench.show([picture, "What is this?"], max_tokens=20, cache=cache) for picture in (A, C)]
        while len(bench.outputs.get(pair[1].request_id, [])) < 5:
            bench.scheduler.step()
        assert bench.scheduler.pause_newest()
        bench.run()
        assert bench.failures == {} and bench.scheduler.stats.paused == 1
        for request, picture in zip(pair, (A, C), strict=True):
            assert words(bench.answer(request)) == words(cold(family, [picture, "What is this?"], max_tokens=20))


def test_an_aborted_request_leaves_no_work_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omlx.engine.vlm._PIECE_S", 0.0)
    bench = VisionBench("idefics3", DictStore())
    request = bench.show([A, "What is this?"])
    until(bench, lambda: any(encoding.steps for encoding in bench.engine._encodings.values()))
    bench.scheduler.abort(request.request_id)
    assert bench.engine._encodings == {} and not bench.scheduler.has_work
    assert bench.outputs[request.request_id][-1].finish_reason == "abort" and bench.encoded == 0
    assert bench.answer(bench.see([A, "What is this?"])) == cold("idefics3", [A, "What is this?"])


def test_work_that_two_wait_for_goes_on_when_one_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omlx.engine.vlm._PIECE_S", 0.0)
    bench = VisionBench("idefics3", DictStore())
    one, two = (bench.show([text, A, "What is this?"]) for text in ("Say: ", "Tell me: "))
    until(bench, lambda: any(len(encoding.users) == 2 for encoding in bench.engine._encodings.values()))
    bench.scheduler.abort(one.request_id)
    bench.run()
    assert bench.encoded == 1 and bench.failures == {}
    assert words(bench.answer(two)) == words(cold("idefics3", ["Tell me: ", A, "What is this?"]))


def until(bench: VisionBench, reached: Any) -> None:
    ends = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < ends
        bench.scheduler.step()


def test_a_picture_that_cannot_be_prepared_fails_its_request_alone() -> None:
    class Gone(Shown):
        def rgb(self) -> Any:
            raise OSError("truncated after all")

    bench = VisionBench("idefics3", DictStore())
    text = bench.show("Tell me.")
    request = bench.show([Gone(A.image, []), "What is this?"])
    bench.run()
    assert list(bench.failures) == [request.request_id]
    assert isinstance(bench.failures[request.request_id], EngineError)
    assert "truncated after all" in str(bench.failures[request.request_id])
    assert bench.answer(text)[-1][1] == "length" and bench.engine._encodings == {}
    again = bench.show([A, "What is this?"])
    bench.run()
    assert bench.answer(again) == cold("idefics3", [A, "What is this?"])


# ---- the layers' caches


def test_the_caches_are_of_classes_that_can_be_batched() -> None:
    caches = VLMRunner(loaded("gemma3")).new_cache()
    assert {type(cache).__module__ for cache in caches} == {"mlx_lm.models.cache"}
    assert [cache.max_size for cache in caches[:2]] == [24, 24] and not hasattr(caches[2], "max_size")
