"""The network: mlx-vlm's idefics3 classes in a very small size, and a forward pass of theirs that can be trained.

mlx-vlm's own pass merges the features into the embeddings through numpy, which has no derivative, and walks
through the pictures one by one. `answer_logits` computes the same from the same parameters.
"""

from typing import Any, NamedTuple

import mlx.core as mx
from mlx_vlm.models.idefics3 import Model, ModelConfig, TextConfig, VisionConfig

from training.micro_vlm import fast
from training.micro_vlm.tokenizer import END, IMAGE, PAD, SPECIAL, VOCAB

SIDE, PATCH = 64, 8


class Sizes(NamedTuple):
    """What may be chosen; the rest is fixed."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    inner: int = 320
    vision_width: int = 128
    vision_layers: int = 3
    vision_heads: int = 4
    vision_inner: int = 256


class Batch(NamedTuple):
    """Rows of equal length, padded on the right.

    `tokens` (rows, length); where a picture is, a token is VOCAB plus the number of its feature among the
    features of all `pixels` (pictures, side, side, 3). `asked` are the flat positions whose next tokens `answers` are.
    """

    tokens: mx.array
    pixels: mx.array | None
    asked: mx.array
    answers: mx.array


def config(sizes: Sizes) -> dict[str, Any]:
    """config.json of the model."""
    text = {
        "model_type": "llama",
        "hidden_size": sizes.width,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    vision = {
        "model_type": "idefics3_vision",
        "hidden_size": sizes.vision_width,
        "intermediate_size": sizes.vision_inner,
        "num_hidden_layers": sizes.vision_layers,
        "num_attention_heads": sizes.vision_heads,
        "num_channels": 3,
        "image_size": SIDE,
        "patch_size": PATCH,
        "layer_norm_eps": 1e-6,
    }
    return {
        "model_type": "idefics3",
        "architectures": ["Idefics3ForConditionalGeneration"],
        "scale_factor": 2,
        "vocab_size": VOCAB,
        "image_token_id": SPECIAL.index(IMAGE),
        "eos_token_id": SPECIAL.index(END),
        "pad_token_id": SPECIAL.index(PAD),
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "text_config": text,
        "vision_config": vision,
    }


def build(settings: dict[str, Any]) -> Model:
    """mlx-vlm's model for a config.json, with random parameters; only the patches' places begin as waves.

    From random places it takes the encoder several times as long to find out which patches lie side by side.
    """
    whole = ModelConfig.from_dict(settings)
    whole.text_config = TextConfig.from_dict(settings["text_config"])
    whole.vision_config = VisionConfig.from_dict(settings["vision_config"])
    model = Model(whole)
    model.vision_model.embeddings.position_embedding.weight = _waves(whole.vision_config.hidden_size)
    return model


def _waves(width: int) -> mx.array:
    """Sines and cosines of each patch's row and column: (patches, width)."""
    side = SIDE // PATCH
    rates = 1.5 * mx.power(0.05, mx.arange(width // 4) / (width // 4))
    angles = mx.arange(side)[:, None] * rates
    one = mx.concatenate([mx.sin(angles), mx.cos(angles)], axis=1)
    rows = mx.broadcast_to(one[:, None], (side, side, width // 2))
    columns = mx.broadcast_to(one[None], (side, side, width // 2))
    return mx.concatenate([rows, columns], axis=2).reshape(side * side, width) * 0.5


def features(model: Model, pixels: mx.array) -> mx.array:
    """The features of pictures (n, side, side, 3): (n * IMAGE_TOKENS, width)."""
    seen = model.connector(encoded(model, pixels))
    return seen.reshape(-1, seen.shape[-1])


def encoded(model: Model, pixels: mx.array) -> mx.array:
    """What the encoder makes of each patch: (n, patches, vision width)."""
    vision = model.vision_model
    count, side = pixels.shape[0], SIDE // PATCH
    cells = pixels.reshape(count, side, PATCH, side, PATCH, 3).swapaxes(2, 3).reshape(count, side * side, -1)
    patches = vision.embeddings.patch_embedding
    x = cells @ patches.weight.reshape(patches.weight.shape[0], -1).T + patches.bias
    x = x + vision.embeddings.position_embedding.weight
    for layer in vision.encoder.layers:
        x = x + _vision_attention(layer.self_attn, layer.layer_norm1(x))
        x = x + layer.mlp.fc2(fast.gelu(layer.mlp.fc1(layer.layer_norm2(x))))
    return vision.post_layernorm(x)


def _vision_attention(attention: Any, x: mx.array) -> mx.array:
    q, k, v = _projected(attention, x, attention.num_heads)
    return attention.out_proj(_joined(fast.softmax((q * attention.scale) @ k.swapaxes(-1, -2)) @ v))


def _text_attention(attention: Any, x: mx.array, mask: mx.array) -> mx.array:
    """Causal attention, before the output projection."""
    q, k, v = _projected(attention, x, attention.n_heads)
    q, k = attention.rope(q) * attention.scale, attention.rope(k)
    return _joined(fast.softmax(q @ k.swapaxes(-1, -2) + mask) @ v)


def _projected(attention: Any, x: mx.array, heads: int) -> list[mx.array]:
    return [_heads(project(x), heads) for project in (attention.q_proj, attention.k_proj, attention.v_proj)]


def _heads(x: mx.array, count: int) -> mx.array:
    rows, length, _ = x.shape
    return x.reshape(rows, length, count, -1).transpose(0, 2, 1, 3)


def _joined(x: mx.array) -> mx.array:
    rows, _, length, _ = x.shape
    return x.transpose(0, 2, 1, 3).reshape(rows, length, -1)


def answer_logits(model: Model, batch: Batch) -> mx.array:
    """The logits at `batch.asked`: (positions, vocabulary)."""
    text = model.language_model
    table = text.embed_tokens.weight
    if batch.pixels is not None:
        table = mx.concatenate([table, features(model, batch.pixels)])
    x = table[batch.tokens]
    length = x.shape[1]
    mask = mx.triu(mx.full((length, length), -1e9), k=1)
    for layer in text.layers:
        seen = _text_attention(layer.self_attn, layer.input_layernorm(x), mask)
        if layer is text.layers[-1]:  # nothing behind it looks at the other positions
            seen, x = (part.reshape(-1, part.shape[-1])[batch.asked] for part in (seen, x))
        x = x + layer.self_attn.o_proj(seen)
        inner, mlp = layer.post_attention_layernorm(x), layer.mlp
        x = x + mlp.down_proj(fast.silu(mlp.gate_proj(inner)) * mlp.up_proj(inner))
    return text.lm_head(text.norm(x))


def loss(model: Model, batch: Batch) -> mx.array:
    """The mean cross entropy of the answers' tokens."""
    logits = answer_logits(model, batch)
    found = mx.take_along_axis(logits, batch.answers[:, None], axis=1)[:, 0]
    return (mx.logsumexp(logits, axis=1) - found).mean()
