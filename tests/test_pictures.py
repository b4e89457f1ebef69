"""Pictures in prompts, as the cache and the scheduler see them: same placeholders, other contents."""

import hashlib
import random
from typing import Any

import pytest

from omlx.cache.block import common_tokens, image_ids, is_image_id, pack_tokens, sure_tokens
from omlx.request import ImageStart, Request
from tests.dict_store import DictStore
from tests.tiny import Bench, TinyRunner, TinyVision

BLOCK = 16
PLACEHOLDER = 7  # what all pictures look like to the model's tokenizer
LENGTH = 20  # positions of a picture


def digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


A, B, C = digest("a"), digest("b"), digest("c")


def text(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(10, 290), k=n)


def prompt(*parts: list[int] | bytes, pieces: int = 1, length: int = LENGTH) -> dict[str, Any]:
    """Texts and pictures one after the other, as arguments of `Bench.ask`."""
    tokens: list[int] = []
    pictures = []
    for part in parts:
        if isinstance(part, bytes):
            pictures.append((len(tokens), part, length))
            tokens += [PLACEHOLDER] * length
        else:
            tokens += part
    vision = TinyVision(tokens, *pictures, pieces=pieces) if pictures else None
    return {"prompt": tokens, "vision": vision}


def cached(request: Request) -> int:
    return request.stats.cached_tokens


@pytest.fixture(params=["on", "strict", "off"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(TinyRunner(), DictStore(), exact=request.param)


# ---- ids


def test_the_ids_of_a_picture_follow_from_its_digest_and_are_no_tokens():
    assert image_ids(A, 40)[:7] == image_ids(A, 7) and set(image_ids(A, 40)).isdisjoint(image_ids(B, 40))
    assert all(1 << 31 <= i < 1 << 32 for i in image_ids(A, 1000))
    packed = pack_tokens([5, *image_ids(A, 1), (1 << 31) - 1])
    assert [is_image_id(packed, at) for at in range(3)] == [False, True, False]


def test_a_few_ids_in_common_do_not_prove_that_it_is_the_same_picture():
    packed = pack_tokens([1, 2, *image_ids(A, 6), 3])
    assert [sure_tokens(packed, n) for n in range(10)] == [0, 1, 2, 2, 2, 2, 2, 7, 8, 9]
    other = pack_tokens([1, 2, image_ids(A, 1)[0], *image_ids(B, 5), 3])  # the first id of both is the same
    assert common_tokens(packed, other) == 3 and sure_tokens(packed, 3) == 2


def test_the_cache_sees_the_pictures_and_then_the_answer():
    asked = prompt(text(1, 4), A, text(2, 3))
    request = Request("r", asked["prompt"], None, vision=asked["vision"])  # type: ignore[arg-type]
    keys = [*text(1, 4), *image_ids(A, LENGTH), *text(2, 3)]
    assert request.cache_tokens(asked["prompt"][:9]) == keys[:9]
    assert request.cache_tokens([*asked["prompt"], 8, 9]) == [*keys, 8, 9]
    assert request.images == (ImageStart(4, A),)


# ---- what is reused


def test_the_same_picture_is_a_hit_and_another_one_is_not(bench: Bench):
    first = bench.ask(**prompt(text(1, 40), A, text(2, 30)))
    again = bench.ask(**prompt(text(1, 40), A, text(2, 30)))
    other = bench.ask(**prompt(text(1, 40), B, text(2, 30)))
    cold = Bench(TinyRunner(), DictStore(), exact=bench.config.exact)
    cold_other = cold.ask(**prompt(text(1, 40), B, text(2, 30)))
    assert cached(again) == 40 + LENGTH + 29 and bench.tokens(again) == bench.tokens(first)
    assert cached(other) <= 40 and bench.tokens(other) == cold.tokens(cold_other)
    if bench.config.exact != "off":  # to the last bit
        assert bench.answer(again) == bench.answer(first) and bench.answer(other) == cold.answer(cold_other)


def test_text_before_the_first_picture_is_shared_with_text_alone():
    bench = Bench(TinyRunner(), DictStore(), exact="off")
    bench.ask(text(1, 60))
    seen = bench.ask(**prompt(text(1, 40), A, text(2, 5)))
    assert cached(seen) == 40
    assert cached(bench.ask([*text(1, 40), *text(9, 5)])) == 40


def test_a_placeholder_that_somebody_wrote_is_no_picture(bench: Bench):
    bench.ask(**prompt(text(1, 40), A, text(2, 30)))
    written = bench.ask([*text(1, 40), *[PLACEHOLDER] * LENGTH, *text(2, 30)])
    assert cached(written) <= 40


def test_replacing_one_picture_of_three_keeps_what_is_before_it():
    bench = Bench(TinyRunner(), DictStore(), exact="off")
    bench.ask(**prompt(text(1, 9), A, text(2, 9), B, text(3, 9), C, text(4, 9)))
    replaced = bench.ask(**prompt(text(1, 9), A, text(2, 9), C, text(3, 9), C, text(4, 9)))
    assert cached(replaced) == 9 + LENGTH + 9
    first = bench.ask(**prompt(text(1, 9), B, text(2, 9), B, text(3, 9), C, text(4, 9)))
    assert cached(first) == 9


def test_a_then_b_then_both_in_either_order(bench: Bench):
    cold = {}
    for pictures in ((A,), (B,), (A, B), (B, A)):
        fresh = Bench(TinyRunner(), DictStore(), exact=bench.config.exact)
        asked = [part for picture in pictures for part in (picture, text(3, 5))]
        cold[pictures] = fresh.tokens(fresh.ask(**prompt(text(1, 8), *asked)))
    for _ in range(2):
        for pictures, expected in cold.items():
            asked = [part for picture in pictures for part in (picture, text(3, 5))]
            assert bench.tokens(bench.ask(**prompt(text(1, 8), *asked))) == expected


@pytest.mark.parametrize("before", [*range(10, 18), 33, 47, 48])
def test_a_picture_may_begin_anywhere_in_a_block(bench: Bench, before: int):
    first = bench.ask(**prompt(text(1, before), A, text(2, 30)))
    again = bench.ask(**prompt(text(1, before), A, text(2, 30)))
    assert bench.tokens(again) == bench.tokens(first) and cached(again) == before + LENGTH + 29
    assert cached(bench.ask(**prompt(text(1, before), B, text(2, 30)))) <= before


def test_pictures_whose_ids_are_alike_in_the_first_block_have_blocks_of_their_own():
    # one position of the picture lies in the first block: 31 bits, which two pictures can have in common
    bench = Bench(TinyRunner(), DictStore(), exact="off")
    bench.ask(**prompt(text(1, BLOCK - 1), A, text(2, 30)))
    alike = prompt(text(1, BLOCK - 1), B, text(2, 30))
    alike["vision"].keys[BLOCK - 1] = image_ids(A, 1)[0]
    assert cached(bench.ask(**alike)) == BLOCK - 1


def test_the_next_turn_goes_on_behind_picture_and_answer(bench: Bench):
    first = bench.ask(**prompt(text(1, 12), A, text(2, 15)))
    answer = bench.tokens(first)
    turn = bench.ask(**prompt(text(1, 12), A, [*text(2, 15), *answer, *text(3, 10)]))
    least = {"off": 12 + LENGTH + 15 + 7, "on": 12 + LENGTH + 14, "strict": 32}[bench.config.exact]
    assert cached(turn) >= least


def test_a_repeated_picture_is_not_mistaken_for_another_place(bench: Bench):
    twice = bench.ask(**prompt(text(1, 5), A, A, text(2, 9)))
    once = bench.ask(**prompt(text(1, 5), A, text(2, 9)))
    cold = Bench(TinyRunner(), DictStore(), exact=bench.config.exact)
    assert bench.tokens(once) == cold.tokens(cold.ask(**prompt(text(1, 5), A, text(2, 9))))
    assert bench.tokens(bench.ask(**prompt(text(1, 5), A, A, text(2, 9)))) == bench.tokens(twice)


# ---- who is where


def test_the_probe_knows_pictures():
    bench = Bench(TinyRunner(), DictStore(), exact="off")
    asked, other = prompt(text(1, 40), A, text(2, 30)), prompt(text(1, 40), B, text(2, 30))
    bench.ask(**asked)
    same = bench.prefix.probe(asked["vision"].keys, images=asked["vision"].starts)
    assert same.cached_tokens == len(asked["prompt"]) - 1
    assert all(block.state == "ram" for block in same.blocks[:-1])
    differs = bench.prefix.probe(other["vision"].keys, images=other["vision"].starts)
    assert differs.first_miss is not None and differs.first_miss.token == 40
    assert differs.first_miss.reason == "differs from the nearest cached prompt in a picture at token 40"


def test_equal_pictures_asked_about_at_once_are_computed_once():
    bench = Bench(TinyRunner(), DictStore(), exact="off", max_stall_s=0.001)
    one, two = (bench.add(**prompt(text(1, 100), A, text(2, 100), text(n, 9))) for n in (3, 4))
    other = bench.add(**prompt(text(1, 100), B, text(2, 100), text(5, 9)))
    bench.run()
    assert bench.scheduler.stats.shared_prefills >= 1
    assert {cached(two), cached(one)} >= {0} and max(cached(one), cached(two)) >= 200
    assert cached(other) <= 100


# ---- the scheduler's side


def test_features_are_prepared_piece_by_piece_while_others_go_on():
    bench = Bench(TinyRunner(), DictStore())
    talking = bench.add(text(8, 5), max_tokens=60)
    while not bench.outputs.get(talking.request_id):
        bench.scheduler.step()
    seen = prompt(text(1, 4), A, text(2, 4), pieces=12)
    looking = bench.add(**seen)
    for _ in range(12):
        bench.scheduler.step()
    assert looking.request_id not in bench.outputs and len(seen["vision"].wanted) == 12
    assert len(bench.tokens(talking)) >= 12  # each piece of work was followed by a token for the other
    bench.run()
    assert len(bench.tokens(looking)) == 8 and len(bench.tokens(talking)) == 60


def test_features_are_asked_for_only_where_they_are_computed():
    bench = Bench(TinyRunner(), DictStore())
    first = prompt(text(1, 40), A, text(2, 30))
    bench.ask(**first)
    again = prompt(text(1, 40), A, text(2, 30))
    bench.ask(**again)
    assert first["vision"].wanted and not again["vision"].wanted
    assert first["vision"].released and again["vision"].released


def test_an_abort_while_features_are_made_ends_the_request():
    bench = Bench(TinyRunner(), DictStore())
    seen = prompt(A, text(2, 4), pieces=1000)
    looking = bench.add(**seen)
    bench.scheduler.step()
    bench.scheduler.abort(looking.request_id)
    assert not bench.scheduler.has_work and seen["vision"].released
    assert bench.outputs[looking.request_id][-1].finish_reason == "abort"


def test_an_encoder_that_fails_fails_its_request_alone(caplog: pytest.LogCaptureFixture):
    class Broken(TinyVision):
        def prepare(self, start: int, stop: int, wait_s: float) -> bool:
            raise RuntimeError("no such picture")

    bench = Bench(TinyRunner(), DictStore())
    tokens = [*[PLACEHOLDER] * LENGTH, 1, 2]
    bad = bench.add(tokens, vision=Broken(tokens, (0, A, LENGTH)))
    good = bench.add(text(3, 30))
    bench.run()
    assert "no such picture" in str(bench.failures[bad.request_id]) and len(bench.tokens(good)) == 8


def test_a_paused_request_continues_with_its_pictures():
    bench = Bench(TinyRunner(), DictStore(), exact="off")
    alone = bench.ask(**prompt(text(1, 20), A, text(2, 9)), max_tokens=30)
    other = bench.add(text(5, 9), max_tokens=40)
    bench.scheduler.step()
    seen = prompt(text(1, 20), A, text(2, 9))
    request = bench.add(**seen, max_tokens=30)
    for _ in range(8):
        bench.scheduler.step()
    assert bench.scheduler.pause_newest()
    bench.run()
    assert bench.tokens(request) == bench.tokens(alone) and len(bench.tokens(other)) == 40
