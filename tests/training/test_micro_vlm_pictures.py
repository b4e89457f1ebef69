"""The synthetic pictures and conversations of micro-vlm: the seed decides everything, and what is said is true."""

import hashlib
import math
import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from random import Random

import numpy as np
import pytest

from training.micro_vlm import pictures
from training.micro_vlm.conversations import Conversation, conversation, first_steps
from training.micro_vlm.pictures import COLOURS, PLACES, Scene

MAKERS = (pictures.solid, pictures.single, pictures.group, pictures.digit)


def conversations(seed: str, count: int) -> list[Conversation]:
    rng = Random(seed)
    return [conversation(rng) for _ in range(count)]


def shown(scene: Scene, x: float, y: float) -> np.ndarray:
    """The pixel at a place given in shares of width and height."""
    picture = pictures.render(scene)
    return picture[int(y * picture.shape[0]), int(x * picture.shape[1])]


def pixels_digest() -> str:
    digest = hashlib.sha256()
    for made in conversations("pixels", 40):
        for scene in made.scenes:
            digest.update(pictures.render(scene).tobytes())
    return digest.hexdigest()


def test_the_seed_decides_every_pixel() -> None:
    """In another process, too, where sets and dictionaries of texts have another order."""
    program = "from tests.training.test_micro_vlm_pictures import pixels_digest; print(pixels_digest())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == pixels_digest()


def test_the_seed_decides_every_word() -> None:
    assert conversations("words", 40) == conversations("words", 40)
    assert conversations("words", 40) != conversations("other words", 40)


def test_two_seeds_share_no_picture() -> None:
    seen = [{pictures.render(s).tobytes() for made in conversations(seed, 60) for s in made.scenes} for seed in "ab"]
    assert len(seen[0]) > 60
    assert not seen[0] & seen[1]


@pytest.mark.parametrize("make", MAKERS)
def test_a_picture_has_the_size_of_its_scene(make: type) -> None:
    for seed in range(20):
        scene = make(Random(seed))
        assert pictures.render(scene).shape == (scene.size[1], scene.size[0], 3)


def test_colours_are_what_they_are_called() -> None:
    for seed in range(60):
        scene = pictures.single(Random(seed), kind="circle")
        thing = scene.things[0]
        low, high = COLOURS[thing.colour]
        middle = shown(scene, thing.x, thing.y)
        assert all(a <= value <= b for a, value, b in zip(low, middle, high, strict=True))


def test_colours_keep_their_distance() -> None:
    names = list(COLOURS)
    for number, one in enumerate(names):
        for other in names[number + 1 :]:
            apart = [max(0, a[0] - b[1], b[0] - a[1]) for a, b in zip(_ranges(one), _ranges(other), strict=True)]
            assert sum(gap * gap for gap in apart) > 40**2, (one, other)


def _ranges(colour: str) -> list[tuple[int, int]]:
    low, high = COLOURS[colour]
    return list(zip(low, high, strict=True))


def test_things_of_a_group_lie_apart_and_inside() -> None:
    for seed in range(60):
        things = pictures.group(Random(seed)).things
        assert all(thing.radius < thing.x < 1 - thing.radius for thing in things)
        assert all(math.dist((a.x, a.y), (b.x, b.y)) > 2.4 * a.radius for a, b in combinations(things, 2))


def test_places_are_where_they_are_called() -> None:
    for seed in range(80):
        for thing in pictures.single(Random(seed)).things:
            if thing.place:
                distance = {name: abs(thing.x - x) + abs(thing.y - y) for name, (x, y) in PLACES.items()}
                assert min(distance, key=distance.__getitem__) == thing.place


def test_answers_agree_with_the_pictures() -> None:
    """Counting answers name the number of things in one of the pictures seen so far, digits a digit among them."""
    counted = 0
    for made in conversations("truth", 300):
        seen: list[Scene] = []
        for turn in made.turns:
            seen += turn.scenes
            if turn.task == "count":
                assert int(turn.answer) in {len(scene.things) for scene in seen}
            if turn.task == "digit":
                assert turn.answer in {scene.things[0].kind for scene in seen if scene.is_digit}
            if turn.task == "no picture":
                assert not seen
            counted += turn.task in ("count", "digit")
    assert counted > 100


def test_the_image_parts_of_a_conversation_are_its_pictures() -> None:
    for made in conversations("parts", 100):
        parts = [part for turn in made.turns for part in turn.parts]
        assert sum(part["type"] == "image" for part in parts) == len(made.scenes)


def test_the_first_steps_are_questions_about_one_of_several_pictures() -> None:
    rng = Random("easy")
    for made in (first_steps(rng) for _ in range(50)):
        assert 2 <= len(made.scenes) <= 3 and made.turns[0].scenes == tuple(made.scenes) and not made.system
        assert {turn.answer for turn in made.turns} <= {scene.colour for scene in made.scenes}
