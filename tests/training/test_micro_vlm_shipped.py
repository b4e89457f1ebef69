"""The micro-vlm that omlx comes with: it answers questions about new pictures, and is what its log says."""

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from PIL import Image

from omlx.errors import NotFound
from omlx.model.folder import MICRO_VLM, find_model, is_model, list_models, models_folder, shipped_models
from omlx.model.starter import pull
from training.micro_vlm import network, pictures
from training.micro_vlm.conversations import Message
from training.micro_vlm.evaluate import NEEDED, Result, evaluate, held_out, load, prepared
from training.micro_vlm.folder import PREPROCESSOR, SHIPPED
from training.micro_vlm.tokenizer import CHAT_TEMPLATE, END, SPECIAL
from training.micro_vlm.train import LOG, Plan, weights_digest

MOST_BYTES = 8 << 20


@pytest.fixture(scope="module")
def result() -> Result:
    return evaluate(SHIPPED)


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return load(SHIPPED)


def answer(loaded: tuple[Any, Any], messages: list[Message], shown: list[Image.Image]) -> str:
    """The answer, decoded greedily through mlx-vlm's own pass, token by token."""
    model, processor = loaded
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[text], images=[shown] if shown else None)
    ids, pixels = inputs["input_ids"], inputs.get("pixel_values")
    said: list[int] = []
    while len(said) < 20 and (not said or said[-1] != SPECIAL.index(END)):
        said.append(int(model(ids, pixels).logits[0, -1].argmax()))
        ids = mx.concatenate([ids, mx.array([said[-1:]], ids.dtype)], axis=1)
    return str(processor.tokenizer.decode(said, skip_special_tokens=True))


def user(text: str, images: int = 1) -> Message:
    return {"role": "user", "content": [*[{"type": "image"}] * images, {"type": "text", "text": text}]}


def test_the_answers_follow_the_pixels(result: Result) -> None:
    print(*result.lines(), sep="\n")
    assert result.share >= NEEDED
    assert result.asked.total() > 1000


def test_every_task_is_asked_about_and_none_is_left_behind(result: Result) -> None:
    assert set(result.asked) >= {"colour", "shape", "count", "position", "digit", "same colour", "same shape"}
    assert not [line for task, line in zip(sorted(result.asked), result.lines(), strict=False) if _weak(result, task)]


def _weak(result: Result, task: str) -> bool:
    return result.right[task] < 0.6 * result.asked[task]  # same shape: 65%; all others are above 85%


def test_the_log_is_that_of_these_weights(result: Result) -> None:
    log = LOG.read_text()
    assert f"model.safetensors sha256 {weights_digest(SHIPPED)}" in log
    assert repr(Plan()) in log
    (wall,) = re.findall(r"^trained in (\d+) s", log, re.MULTILINE)
    (share,) = re.findall(r"^all .* (\d+\.\d)%$", log, re.MULTILINE)
    assert int(wall) <= 45 * 60
    assert abs(float(share) - 100 * result.share) < 0.5  # another machine's last bits may turn an answer


def test_the_folder_is_what_the_training_writes() -> None:
    assert json.loads((SHIPPED / "config.json").read_bytes()) == network.config(Plan().sizes)
    assert json.loads((SHIPPED / "preprocessor_config.json").read_bytes()) == PREPROCESSOR
    assert json.loads((SHIPPED / "tokenizer_config.json").read_bytes())["chat_template"] == CHAT_TEMPLATE
    assert sum(file.stat().st_size for file in SHIPPED.glob("*.safetensors")) <= MOST_BYTES


def test_greedy_decoding_gives_what_the_evaluation_counts(loaded: tuple[Any, Any]) -> None:
    """Answers decoded token by token are those that the one pass of the evaluation finds right or wrong."""
    right = 0
    for whole in [one for one in held_out(40) if one.turns[0].scenes][:8]:
        made = whole._replace(turns=whole.turns[:1])
        turn = made.turns[0]
        one = prepared(loaded[1], made)
        guessed = loaded[0](mx.array(one.ids)[None], one.pixels[None] if one.pixels is not None else None)
        span = one.spans[0]
        found = guessed.logits[0, span.start - 1 : span.stop - 1].argmax(axis=1).tolist() == one.ids[span].tolist()
        shown = [Image.fromarray(pictures.render(scene)) for scene in made.scenes]
        said = answer(loaded, made.messages()[:-1], shown)
        assert (said == turn.answer) == found
        right += found
    assert right > 4


@pytest.mark.parametrize("name", ["red", "green", "blue", "yellow", "orange", "purple", "white", "black"])
def test_plain_pictures_have_the_colours_of_css(loaded: tuple[Any, Any], name: str) -> None:
    picture = Image.new("RGB", (64, 64), name)
    assert answer(loaded, [user("What colour is the picture?")], [picture]) == name


def test_pictures_of_a_conversation_keep_their_order(loaded: tuple[Any, Any]) -> None:
    red, blue = (Image.new("RGB", (64, 64), name) for name in ("red", "blue"))
    asked = [user("What colour is the first picture?", images=2)]
    assert answer(loaded, asked, [red, blue]) == "red"
    assert answer(loaded, asked, [blue, red]) == "blue"


@pytest.mark.parametrize("question", ["What colour is the picture?", "How many shapes are there?", "Read the digit."])
def test_without_a_picture_it_says_so(loaded: tuple[Any, Any], question: str) -> None:
    assert answer(loaded, [{"role": "user", "content": question}], []) == "there is no picture"


def test_it_is_found_by_name_and_listed(tmp_path: Path) -> None:
    assert find_model(MICRO_VLM, tmp_path) == SHIPPED
    assert [info.name for info in shipped_models()] == [MICRO_VLM]
    assert shipped_models()[0].size_bytes <= MOST_BYTES + (1 << 20)
    assert list_models(tmp_path) == []
    with pytest.raises(NotFound):
        find_model("data/micro-vlm", tmp_path)


def test_pull_copies_it_into_the_home_folder_which_goes_before(tmp_path: Path) -> None:
    folder = pull(MICRO_VLM, tmp_path)
    assert folder == models_folder(tmp_path) / MICRO_VLM
    assert is_model(folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        file.name: file.read_bytes() for file in SHIPPED.iterdir()
    }
    assert [info.name for info in list_models(tmp_path)] == [MICRO_VLM]
    assert find_model(MICRO_VLM, tmp_path) == folder
    (folder / "mine").touch()
    assert pull(MICRO_VLM, tmp_path) == folder  # again: left as it is
    assert (folder / "mine").exists()
