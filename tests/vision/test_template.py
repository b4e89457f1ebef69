"""From messages to prompts: where pictures are, and what only looks like one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_vlm.models.llava.processing_llava import LlavaProcessor
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from omlx.errors import BadRequest
from omlx.model.control_tokens import control_tokens
from omlx.model.vision_template import VisionTemplate
from omlx.model.vlm_loader import load_vision
from tests.dict_store import DictStore
from tests.vision.models import FAMILIES, VisionBench, folder, loaded, messages
from tests.vision.pictures import noise

A, B = noise(1), noise(2, 64, 33)
PARTS_ONLY = ("llava",)


def template(family: str, most_chars: int = 100_000) -> VisionTemplate:
    model = loaded(family)
    return VisionTemplate(model.loaded.tokenizer, "tiny", model.family, most_chars)


def tokens(made: VisionTemplate, *turns: Any) -> tuple[list[int], list[Any]]:
    asked, pictures = messages(*turns)
    safe = control_tokens(made._tokenizer, made.marks).sanitized(asked, {}, [])
    return made.tokens(safe.messages, safe.args, pictures, literals=safe.literals)


def looks_like_pictures(family: str) -> list[str]:
    model = loaded(family).family
    return sorted({model.marker, model.image_token, model.literal})


@pytest.mark.parametrize("family", FAMILIES)
def test_what_looks_like_a_picture_in_a_text_is_text(family: str) -> None:
    """In front of pictures, between and behind them, and in what the model said."""
    made, tokenizer = template(family), loaded(family).loaded.tokenizer
    for stray in looks_like_pictures(family):
        _, before = tokens(made, [A, "X", B, "X"], "X", ["X", A, "X"])
        ids, images = tokens(made, [A, f"a {stray}", B, f"{stray}{stray} b"], f"c {stray}", [f"d{stray}", A, "X"])
        for image, expected in zip(images, before, strict=True):
            assert len(image.positions) == len(expected.positions)
            assert [image.picture, image.digest] == [expected.picture, expected.digest]
        seen = {at for image in images for at in image.positions.tolist()}
        assert seen == {at for at, token in enumerate(ids) if token == loaded(family).family.image_token_id}
        text = tokenizer.decode(ids)
        assert text.count(f"{stray}{stray} b") == text.count(f"a {stray}") == text.count(f"c {stray}") == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_to_a_stray_is_that_of_ordinary_tokens(family: str) -> None:
    """In a prompt with a picture and in one without."""
    stray = loaded(family).family.image_token
    bench = VisionBench(family, DictStore())
    request = bench.see([A, f"What does {stray} mean?"])
    assert len(request.vision.starts) == 1 and bench.encoded == 1
    text = bench.see(f"What does {stray} mean?")
    assert text.vision is None and loaded(family).family.image_token_id not in text.prompt
    assert bench.encoded == 1


def test_tools_and_arguments_of_the_template_are_text_too(tmp_path: Path) -> None:
    """The arguments of earlier calls among them, which a template writes as JSON."""
    made = rewritten(
        tmp_path,
        "qwen2_vl",
        "{{ style }}{{ tools | tojson }}{% for m in messages %}"
        "{% for p in m['content'] if m['content'] is not string %}"
        "{% if p['type'] == 'image' %}<|image_pad|>{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
        "{{ m['tool_calls'] | default([]) | tojson }}{% endfor %}!",
    )
    stray = "<|image_pad|>"
    asked, pictures = messages([A, "x"])
    asked.append({"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"a": stray}}]})
    tools = [{"name": "f", "description": f"draws {stray}"}]
    model = loaded("qwen2_vl")
    safe = control_tokens(model.loaded.tokenizer).sanitized(asked, {"style": f"plain {stray} "}, tools)
    ids, images = made.tokens(safe.messages, safe.args, pictures, safe.tools, literals=safe.literals)
    assert ids.count(model.family.image_token_id) == len(images[0].positions)
    picture = model.family.layout(A.size).text
    assert model.loaded.tokenizer.decode(ids) == (
        f'plain {stray} [{{"name": "f", "description": "draws {stray}"}}]{picture}x[]'
        f'[{{"name": "f", "arguments": {{"a": "{stray}"}}}}]!'
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_without_pictures_is_what_the_template_writes(family: str) -> None:
    ids, images = tokens(template(family), "What is this?", "A cat.", "Are you sure?")
    assert images == []
    text = loaded(family).loaded.tokenizer.decode(ids)
    assert text == (
        "<|im_start|>user\nWhat is this?<|im_end|>\n<|im_start|>assistant\nA cat.<|im_end|>\n"
        "<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_text_in_front_of_the_first_picture_is_shared_with_prompts_without_one() -> None:
    bench = VisionBench("qwen2_vl", DictStore(), exact="off")
    story = "A long story that both begin with, long enough for several blocks of the cache. "
    bench.see(story + "The end.")
    request = bench.see([story, A, "Well?"])
    assert request.stats.cached_tokens >= len(story)


def test_the_digest_is_of_pixels_and_of_what_is_done_to_them() -> None:
    digests = {family: template(family).digest(A) for family in FAMILIES}
    assert len(set(digests.values())) == len(FAMILIES) - 2  # smolvlm does what idefics3 does, qwen2_5 what qwen2 does
    assert digests["idefics3"] != digests["idefics3-unsplit"]
    assert template("llava").digest(noise(1)) == digests["llava"] != template("llava").digest(B)


PIECES = st.sampled_from(["<", "image", ">", "<image>", "<fake_token_around_image>", " ", "omlx", "0", "z", "a", "ä"])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.none(), st.lists(PIECES, max_size=6).map("".join)), max_size=6))
def test_whatever_stands_around_them_pictures_are_found(parts: list[str | None]) -> None:
    """`None` is a picture. Texts next to each other may form what stands for one: that is text as well."""
    turn = [A if part is None else part for part in parts]
    ids, images = tokens(template("idefics3"), turn)
    layout, tokenizer = loaded("idefics3").family.layout(A.size), loaded("idefics3").loaded.tokenizer
    texts = [layout.text if part is None else part for part in parts]
    assert tokenizer.decode(ids) == f"<|im_start|>user\n{''.join(texts)}<|im_end|>\n<|im_start|>assistant\n"
    # A character of a text is as many tokens as it has bytes.
    lengths = [
        len(tokenizer.encode(text, add_special_tokens=False)) if part is None else len(text.encode())
        for part, text in zip(parts, texts, strict=True)
    ]
    begins = [len("|user\n") + sum(lengths[:at]) for at, part in enumerate(parts) if part is None]
    assert [image.picture for image in images] == [A] * parts.count(None)
    for image, begin in zip(images, begins, strict=True):
        assert ids[begin] == tokenizer.convert_tokens_to_ids("<fake_token_around_image>")
        assert image.start == begin + 2 and image.end < begin + len(layout.text)
        assert len(image.positions) == layout.positions


# ---- templates


def rewritten(tmp_path: Path, family: str, chat_template: str) -> VisionTemplate:
    made = shutil.copytree(folder(family), tmp_path / "m")
    file = made / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": chat_template}))
    model = load_vision(made)
    return VisionTemplate(model.loaded.tokenizer, "tiny", model.family, 100_000)


TEXT_ONLY = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3"])
def test_a_template_that_knows_text_alone_gets_pictures_as_text(family: str, tmp_path: Path) -> None:
    made = rewritten(tmp_path, family, TEXT_ONLY)
    ids, images = tokens(made, [A, "What is this?"], "A cat.", ["And ", B, " this?"])
    model = loaded(family)
    text = model.loaded.tokenizer.decode(ids)
    pictures = [model.family.literal.replace(model.family.marker, model.family.layout(p.size).text) for p in (A, B)]
    assert (
        text == f"user: {pictures[0]}\nWhat is this?\nassistant: A cat.\nuser: And \n{pictures[1]}\n this?\nassistant: "
    )
    assert [image.picture for image in images] == [A, B]
    assert tokens(made, "Hello")[0] == model.loaded.tokenizer.encode("user: Hello\nassistant: ")


@pytest.mark.parametrize("written", [True, False])
def test_the_token_that_begins_a_text_is_there_once(written: bool, tmp_path: Path) -> None:
    made = shutil.copytree(folder("llava"), tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<|im_end|> $A", special_tokens=[("<|im_end|>", 257)])
    tokenizer.save(str(made / "tokenizer.json"))
    file = made / "tokenizer_config.json"
    begin = {"bos_token": "<|im_end|>", "chat_template": ("{{ bos_token }}" if written else "") + TEXT_ONLY}
    file.write_text(json.dumps(json.loads(file.read_text()) | begin))
    model = load_vision(made)
    ids, images = tokens(VisionTemplate(model.loaded.tokenizer, "tiny", model.family, 100_000), [A, "x"])
    assert ids.count(257) == 1 and ids[:2] == [257, ord("u")]
    assert images[0].start == 1 + len("user: ")
    if not written:  # mlx-vlm leaves it to its processor, whatever the template wrote
        processor = LlavaProcessor.from_pretrained(made)
        assert ids == processor(images=[A.image], text=["user: <image>\nx\nassistant: "])["input_ids"].tolist()[0]


def test_a_template_that_drops_a_picture_is_said(tmp_path: Path) -> None:
    once = "{% for m in messages %}{% if loop.last and m['content'] is not string %}<image>{% endif %}x{% endfor %}"
    made = rewritten(tmp_path, "idefics3", once + "{{ messages[0]['content'][1]['text'] }}y")
    with pytest.raises(BadRequest, match="has room for 1 images in these messages, which have 2"):
        tokens(made, [A, "a"], "b", [B, "c"])


def test_a_template_that_ends_with_a_picture_is_refused(tmp_path: Path) -> None:
    made = rewritten(tmp_path, "llava", "{% for m in messages %}{{ m['content'][1]['text'] }}<image>{% endfor %}")
    with pytest.raises(BadRequest, match="an image is the very last"):
        tokens(made, [A, "What is this?"])


def test_a_picture_pieced_together_by_the_template_is_text() -> None:
    ids, images = tokens(template("idefics3"), [A, "an <ima", "ge>"])
    assert len(images) == 1 and ids.count(loaded("idefics3").family.image_token_id) == len(images[0].positions)


def test_what_no_template_may_be_told_is_refused() -> None:
    asked, pictures = messages([A, "x"])
    with pytest.raises(BadRequest, match="must not set 'tokenize'"):
        template("gemma3").tokens(asked, {"tokenize": True}, pictures)


@pytest.mark.parametrize("turn", ["word " * 30, [A, A, A, "x"]])
def test_a_prompt_too_long_for_the_context_is_refused_before_it_is_tokenized(turn: Any) -> None:
    with pytest.raises(BadRequest, match="more than the context of model 'tiny' can hold") as refused:
        tokens(template("idefics3", most_chars=100), turn)
    assert refused.value.code == "context_length_exceeded"
