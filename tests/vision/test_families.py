"""Each family does with a picture what mlx-vlm's own processor and model do."""

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from omlx.errors import BadRequest
from omlx.model.vision_qwen import mrope_positions
from omlx.model.vision_template import VisionTemplate
from tests.dict_store import DictStore
from tests.vision.models import FAMILIES, MROPE, VisionBench, loaded, messages, reference, runner
from tests.vision.pictures import Shown, noise

A, B, C = noise(1), noise(2, 70, 33), noise(3, 32, 64)
QUESTIONS: dict[str, tuple[Any, ...]] = {
    "one": ([A, "What is this?"],),
    "two": (["Look at these: ", A, " and ", B, " - which is larger?"],),
    "turns": ([A, "What is it?"], "A square.", ["And ", C, "?", B, " or this?"]),
}


def template(family: str) -> VisionTemplate:
    model = loaded(family)
    return VisionTemplate(model.loaded.tokenizer, "tiny", model.family, 100_000)


def processed(family: str, *turns: Any) -> Any:
    """What mlx-vlm's processor makes of the same conversation."""
    asked, pictures = messages(*turns)
    for message in asked:
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
    tokenizer = loaded(family).loaded.tokenizer
    text = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    images = [picture.image for picture in pictures]
    return reference(family)[1](images=images, text=[text])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_token_ids_are_those_of_the_processor(family: str, question: str) -> None:
    turns = QUESTIONS[question]
    asked, pictures = messages(*turns)
    tokens, images = template(family).tokens(asked, {}, pictures)
    assert tokens == processed(family, *turns)["input_ids"].tolist()[0]
    assert [image.picture for image in images] == pictures
    places = [at for image in images for at in image.positions.tolist()]
    assert places == [at for at, token in enumerate(tokens) if token == loaded(family).family.image_token_id]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_picture_becomes_follows_from_its_size_as_the_processor_says(family: str) -> None:
    rng, model = random.Random(7), loaded(family)
    edges = [
        (1, 1),
        (1200, 700),
        (900, 901),
        (32, 32),
        (33, 32),
        (64, 64),
        (65, 64),
        (63, 129),
        (1, 200),
        (200, 1),
        (31, 700),
        (700, 31),
    ]
    for width, height in edges + [(rng.randint(1, 300), rng.randint(1, 300)) for _ in range(60)]:
        picture = noise(width, width, height)
        inputs = processed(family, [picture, "x"])
        ids = inputs["input_ids"]
        expected = int((ids == model.family.image_token_id).sum())
        layout = model.family.layout(picture.size)
        assert layout.positions == expected == layout.text.count(model.family.image_token), picture.size
        assert template(family).tokens(*sized([picture, "x"]))[0] == ids.tolist()[0]
        if family not in MROPE:
            expected = np.asarray(inputs["pixel_values"])
            assert np.array_equal(model.family.pixels(picture.image).values, expected.reshape(-1, *expected.shape[-3:]))


def sized(*turns: Any) -> tuple[Any, dict[str, Any], list[Shown]]:
    asked, pictures = messages(*turns)
    return asked, {}, pictures


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_that_is_a_line_is_refused(family: str) -> None:
    with pytest.raises(BadRequest, match="image 1: 401 x 2 pixels"):
        template(family).tokens(*sized([noise(1, 401, 2), "x"]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_logits_are_those_of_the_model_as_mlx_vlm_runs_it(family: str, question: str) -> None:
    """At the last token of the prompt, and in the answer (so with what the cache keeps of the prompt)."""
    turns = QUESTIONS[question]
    expected = expected_logits(family, processed(family, *turns))
    bench = VisionBench(family, DictStore())
    request = bench.see(*turns, max_tokens=1, top_logprobs=20)
    best = bench.outputs[request.request_id][0].top_logprobs
    scores = expected - mx.logsumexp(expected)
    assert len(best) == 20
    for token, logprob in best:
        assert logprob == pytest.approx(scores[token].item(), abs=1e-4)


def expected_logits(family: str, inputs: Any) -> mx.array:
    """Of mlx-vlm's model for the whole prompt at once."""
    model, _ = reference(family)
    ids, more = inputs["input_ids"], {k: v for k, v in inputs.items() if k not in ("input_ids", "num_crops")}
    mask, pixels = more.pop("attention_mask"), more.pop("pixel_values")
    if family == "gemma3":  # called as a whole it attends to tokens to come; mlx-vlm generates like this
        features = model.get_input_embeddings(ids, pixels, mask=mask)
        return model.language_model(ids, inputs_embeds=features.inputs_embeds).logits[0, -1]
    if family == "llava":
        return model(ids, pixels, None).logits[0, -1]
    return model(ids, pixels, **more).logits[0, -1]


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_computed_in_pieces_that_change_nothing(family: str) -> None:
    model = loaded(family)
    pixels = model.family.pixels(B.rgb())
    pieces, features = finished(model.family.encode(pixels))
    assert pieces >= 2
    expected = model.family.layout(B.size).positions, model.family.width
    assert features.shape == expected and features.dtype == model.family.dtype
    if family in MROPE:
        inputs = processed(family, [B, "x"])
        at_once = model.loaded.model.vision_tower(inputs["pixel_values"], inputs["image_grid_thw"])
        whole = mx.concatenate([at_once[0], *at_once[1]], axis=1) if family == "qwen3_vl" else at_once
        assert mx.array_equal(features, whole)


def finished(steps: Any) -> tuple[int, mx.array]:
    """How many pieces there were, and what they gave."""
    pieces = 0
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return pieces, done.value
        pieces += 1


@pytest.mark.parametrize("family", MROPE)
def test_rope_positions_are_those_of_the_model(family: str) -> None:
    """Many layouts: pictures of all sizes, next to each other, at the beginning and with long texts between."""
    model, rng = reference(family)[0], random.Random(5)
    config = model.config
    for _ in range(40):
        tokens, starts, grids = [], [], []
        for _ in range(rng.randint(1, 4)):
            rows, columns = rng.randint(1, 9), rng.randint(1, 9)
            tokens += [1] * rng.choice([0, 1, 30]) + [config.vision_start_token_id]
            starts.append((len(tokens), (rows, columns)))
            grids.append([1, 2 * rows, 2 * columns])
            tokens += [config.image_token_id] * (rows * columns) + [1]
        tokens += [1] * rng.randint(1, 20)
        expected, delta = model.language_model.get_rope_index(mx.array([tokens]), mx.array(grids))
        positions = mrope_positions(len(tokens), starts)
        assert np.array_equal(positions, np.asarray(expected)[:, 0])
        assert positions.max() + 1 - len(tokens) == delta.item()


@pytest.mark.parametrize("family", MROPE)
def test_running_leaves_no_positions_on_the_model(family: str) -> None:
    bench = VisionBench(family, DictStore())
    bench.see([A, "What?"])
    bench.see("Only text.")
    language = runner(family).decoder.language_model
    assert language._rope_deltas is None and language._position_ids is None
