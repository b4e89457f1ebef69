"""What micro-vlm is trained with is what it is served with: pass, pixels, prompts."""

from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_vlm.models.idefics3.processing_idefics3 import Idefics3Processor
from mlx_vlm.utils import load_model
from PIL import Image
from tokenizers import Tokenizer

from training.micro_vlm import fast, network, pictures
from training.micro_vlm.batches import answer_spans, example, joined, processed
from training.micro_vlm.conversations import Conversation, conversation
from training.micro_vlm.evaluate import prepared
from training.micro_vlm.folder import save_model
from training.micro_vlm.network import Sizes
from training.micro_vlm.tokenizer import CHAT_TEMPLATE, END, IMAGE, IMAGE_TOKENS, VOCAB, train_tokenizer

TINY = Sizes(width=32, layers=2, heads=2, inner=48, vision_width=32, vision_layers=1, vision_heads=2, vision_inner=48)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(300)


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny untrained micro-vlm as it would be shipped."""
    mx.random.seed(3)
    made = tmp_path_factory.mktemp("micro")
    settings = network.config(TINY)
    save_model(network.build(settings), settings, tokenizer, made)
    return made


@pytest.fixture(scope="module")
def served(folder: Path) -> Any:
    """The folder's model, loaded by mlx-vlm."""
    model = load_model(folder)
    model.set_dtype(mx.float32)
    return model


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    return Idefics3Processor.from_pretrained(folder)


def conversations(count: int) -> list[Conversation]:
    rng = Random("network")
    return [conversation(rng) for _ in range(count)]


def test_a_saved_folder_loads_with_every_weight(folder: Path, served: Any) -> None:
    assert served.config.image_token_index == 4
    assert served.language_model.embed_tokens.weight.shape == (VOCAB, TINY.width)
    assert mx.load(str(folder / "model.safetensors"))["language_model.lm_head.weight"].dtype == mx.float16


def test_the_trained_pass_is_that_of_mlx_vlm(tokenizer: Tokenizer, served: Any) -> None:
    """Batched, padded and merged differently, the logits at the answers are the same."""
    made = [one for one in conversations(14) if one.scenes]
    batch = joined([example(tokenizer, one) for one in made])
    ids = mx.where(batch.tokens >= VOCAB, served.config.image_token_index, batch.tokens)
    assert batch.pixels is not None
    whole = served(ids, batch.pixels.transpose(0, 3, 1, 2)[None]).logits
    expected = whole.reshape(-1, VOCAB)[batch.asked]
    assert mx.allclose(network.answer_logits(served, batch), expected, atol=5e-4)


def test_without_pictures_too(tokenizer: Tokenizer, served: Any) -> None:
    batch = joined([example(tokenizer, one) for one in conversations(200) if not one.scenes])
    assert batch.pixels is None
    expected = served(batch.tokens, None).logits.reshape(-1, VOCAB)[batch.asked]
    assert mx.allclose(network.answer_logits(served, batch), expected, atol=5e-4)


def test_the_loss_has_a_derivative_for_every_parameter(tokenizer: Tokenizer) -> None:
    model = network.build(network.config(TINY))
    batch = joined([example(tokenizer, one) for one in conversations(6)])
    value, gradients = nn.value_and_grad(model, network.loss)(model, batch)
    flat = dict(nn.utils.tree_flatten(gradients))
    unused = {name for name, gradient in flat.items() if not mx.any(gradient != 0)}
    assert value.item() > 0
    assert unused <= {"vision_model.encoder.layers.0.self_attn.k_proj.bias"}  # softmax does not feel it


@pytest.mark.parametrize("size", [(64, 64), (40, 40), (200, 200), (90, 61), (61, 90), (41, 64), (255, 180)])
def test_pixels_are_those_of_the_processor(processor: Any, size: tuple[int, int]) -> None:
    scene = pictures.single(Random(4))._replace(size=size)
    picture = pictures.render(scene)
    expected = np.array(processor.image_processor([[Image.fromarray(picture)]])["pixel_values"])[0, 0]
    assert np.abs(processed(picture).transpose(2, 0, 1) - expected).max() < 1e-6


def test_prompts_are_those_of_template_and_processor(tokenizer: Tokenizer, processor: Any) -> None:
    for made in conversations(20):
        assert prepared(processor, made).ids.tolist() == example(tokenizer, made).ids.tolist()


def test_a_prompt_ends_where_the_answer_begins(processor: Any) -> None:
    template = processor.tokenizer.apply_chat_template
    question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}
    prompt = template([question], tokenize=False, add_generation_prompt=True)
    whole = template([question, {"role": "assistant", "content": "red"}], tokenize=False)
    assert whole == f"{prompt}red{END}\n"
    assert processor.tokenizer.chat_template == CHAT_TEMPLATE
    ids = processor.tokenizer.encode(prompt)
    assert processor.tokenizer.encode(whole)[: len(ids)] == ids


def test_the_spans_of_answers_are_the_answers(tokenizer: Tokenizer) -> None:
    made = conversations(1)[0]
    ids = example(tokenizer, made).ids
    spans = answer_spans(lambda text: tokenizer.encode(text).ids, ids)
    texts = [tokenizer.decode(ids[span.start : span.stop].tolist(), skip_special_tokens=False) for span in spans]
    assert texts == [turn.answer + END for turn in made.turns]


@pytest.mark.parametrize("text", ["What colour?", "Größe 漢字 🙂\r\n\t\0", "<|not a token|>", "a" * 300])
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_picture_takes_as_many_tokens_as_it_has_features(processor: Any, served: Any) -> None:
    image = Image.fromarray(pictures.render(pictures.digit(Random(1))))
    inputs = processor(text=[IMAGE], images=[[image]])
    assert (np.array(inputs["input_ids"]) == served.config.image_token_index).sum() == IMAGE_TOKENS


@pytest.mark.parametrize(
    ("quick", "plain"),
    [(fast.softmax, lambda x: mx.softmax(x, axis=-1)), (fast.silu, nn.silu), (fast.gelu, nn.gelu)],
    ids=["softmax", "silu", "gelu"],
)
def test_the_fast_functions_are_those_of_mlx(quick: Any, plain: Any) -> None:
    x, weight = mx.random.normal((5, 40)) * 4, mx.random.normal((5, 40))
    ours, theirs = (mx.vjp(function, [x], [weight]) for function in (quick, plain))
    assert mx.allclose(ours[0][0], theirs[0][0], atol=5e-4)
    assert mx.allclose(ours[1][0], theirs[1][0], atol=1e-3)
