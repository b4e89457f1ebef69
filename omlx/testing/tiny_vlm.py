"""Tiny vision-language models for tests: ordinary model folders with random weights, of every family that omlx runs.

They need the extra `vision`.
"""

from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

from omlx.testing.byte_tokenizer import write_byte_tokenizer, write_json

_HIDDEN = 64
_VOCAB = 288
_TILE = 32  # pixels a side
_TEXT: dict[str, Any] = {
    "hidden_size": _HIDDEN, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": _VOCAB, "max_position_embeddings": 4096,
    "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
_TILES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "image_size": _TILE, "patch_size": 4,
}  # fmt: skip
_STRIPS = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_MROPE = {"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}}
_MIDDLE = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}

_BEGIN, _END = "<|im_start|>", "<|im_end|>"
# A message is text, or parts.
_EITHER = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}MARKER{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Parts alone, pictures first, as LLaVA's own template has it.
_PARTS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}MARKER\n{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class _Family(NamedTuple):
    """Special tokens after the two of the chat, the config (names of tokens in <> become ids), and other files."""

    special: tuple[str, ...]
    template: str
    config: dict[str, Any]
    preprocessor: dict[str, Any]
    processor: dict[str, Any] = {}  # noqa: RUF012  read only
    nested: bool = True  # the text's config lies in a part of its own


def _idefics3(kind: str, *, splits: bool = True) -> _Family:
    rows = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
    return _Family(
        ("<image>", "<fake_token_around_image>", "<global-img>", *rows),
        _EITHER.replace("MARKER", "<image>"),
        {
            "image_token_id": "<image>", "scale_factor": 2, "text_config": _TEXT | {"model_type": "llama"},
            "vision_config": _TILES | {"model_type": f"{kind}_vision"},
        },
        _MIDDLE | {
            "image_processor_type": "SmolVLMImageProcessor" if kind == "smolvlm" else "Idefics3ImageProcessor",
            "do_image_splitting": splits, "size": {"longest_edge": 2 * _TILE if splits else _TILE},
            "max_image_size": {"longest_edge": _TILE},
        },
        {"image_seq_len": 16},
    )  # fmt: skip


def _qwen(vision: dict[str, Any], text: dict[str, Any], **options: Any) -> _Family:
    tokens = {
        "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
    }  # fmt: skip
    return _Family(
        tuple(tokens.values()),
        _EITHER.replace("MARKER", "<|vision_start|><|image_pad|><|vision_end|>"),
        tokens | {"text_config": _TEXT | _MROPE | text, "vision_config": _STRIPS | vision},
        _MIDDLE | {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 256, "max_pixels": 4096},
        **options,
    )


_FAMILIES = {
    "llava": _Family(
        ("<image>",),
        _PARTS.replace("MARKER", "<image>"),
        {
            "image_token_index": "<image>", "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
            "text_config": _TEXT | {"model_type": "llama"},
            "vision_config": _TILES | {"model_type": "clip_vision_model"},
        },
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": _TILE}, "crop_size": _TILE},
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "idefics3": _idefics3("idefics3"),
    "idefics3-unsplit": _idefics3("idefics3", splits=False),
    "smolvlm": _idefics3("smolvlm"),
    "qwen2_vl": _qwen(
        {"model_type": "qwen2_vl", "embed_dim": 32, "hidden_size": _HIDDEN, "mlp_ratio": 2}, {}, nested=False
    ),
    "qwen2_5_vl": _qwen(
        {
            "model_type": "qwen2_5_vl", "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": _HIDDEN,
            "window_size": 16, "fullatt_block_indexes": [1],
        },
        {}, nested=False,
    ),
    "qwen3_vl": _qwen(
        {
            "model_type": "qwen3_vl", "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": _HIDDEN,
            "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
        },
        {"model_type": "qwen3_vl_text", "head_dim": 16},
    ),
    "gemma3": _Family(
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        _EITHER.replace("MARKER", "<start_of_image>"),
        {
            "image_token_index": "<image_soft_token>", "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>", "hidden_size": _HIDDEN, "pad_token_id": _VOCAB - 1,
            "text_config": _TEXT | {
                "model_type": "gemma3_text", "num_hidden_layers": 3, "head_dim": 16, "query_pre_attn_scalar": 16,
                "sliding_window": 24, "sliding_window_pattern": 3, "mm_tokens_per_image": 16,
            },
            "vision_config": _TILES | {"model_type": "siglip_vision_model"},
        },
        _MIDDLE | {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": _TILE, "width": _TILE}},
        {"image_seq_length": 16},
    ),
}  # fmt: skip
TINY_VLMS = tuple(_FAMILIES)
"""What `make_tiny_vlm` makes: the families that omlx runs; of "idefics3" also one that does not split its pictures."""


def make_tiny_vlm(folder: Path, family: str, *, seed: int = 0) -> Path:
    """Write a random vision-language model of a family (one of TINY_VLMS) into `folder`; return it.

    Its tokens 0 to 255 are bytes, then come <|im_start|>, <|im_end|> (the end of an answer) and those that the family
    needs; the chat format is ChatML. A picture is seen as 16 to 80 positions, at 32 to 64 pixels a side. Weights
    are large enough that greedy answers vary with words and pixels; only printable ASCII and the newline are
    ever likely in them. The same arguments give the same bytes.
    """
    made = _FAMILIES[family]
    folder.mkdir(parents=True, exist_ok=True)
    special = (_BEGIN, _END, *made.special)
    config = _config(made, family.partition("-")[0], {name: 256 + at for at, name in enumerate(special)})
    write_json(folder / "config.json", config)
    write_json(folder / "preprocessor_config.json", made.preprocessor)
    if made.processor:
        write_json(folder / "processor_config.json", made.processor)
    _write_tokenizer(folder, family, special, made.template)
    mx.save_safetensors(str(folder / "model.safetensors"), _weights(folder, config, seed), {"format": "mlx"})
    return folder


def _config(made: _Family, model_type: str, ids: dict[str, int]) -> dict[str, Any]:
    values: dict[str, Any] = {
        key: ids.get(value, value) if isinstance(value, str) else value for key, value in made.config.items()
    }
    text: dict[str, Any] = {} if made.nested else values.pop("text_config")
    fixed: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": _VOCAB,
        "eos_token_id": [ids[_END]],
        "bos_token_id": ids[_BEGIN],
    }
    return fixed | text | values


def _write_tokenizer(folder: Path, family: str, special: tuple[str, ...], template: str) -> None:
    config: dict[str, Any] = {
        "eos_token": _END, "pad_token": _END, "model_max_length": 4096, "chat_template": template,
    }  # fmt: skip
    if family == "gemma3":
        names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
        config["extra_special_tokens"] = names
    write_byte_tokenizer(folder, special, config)


def _weights(folder: Path, config: dict[str, Any], seed: int) -> dict[str, mx.array]:
    """As mlx-vlm's model of this config names them."""
    utils = import_module("mlx_vlm.utils")
    config = utils.load_config(folder)
    module, _ = utils.get_model_and_args(config)
    settings = module.ModelConfig.from_dict(config)
    settings = utils.update_module_configs(settings, module, config, ["text", "vision"])
    mx.random.seed(seed)
    weights = dict(tree_flatten(tree_map_with_path(_random, module.Model(settings).parameters())))
    head = weights["language_model.lm_head.weight"]
    unlikely = [token for token in range(_VOCAB) if not (token == 10 or 32 <= token < 127)]
    head[mx.array(unlikely)] = 0.0
    return weights


def _random(path: str, parameter: mx.array) -> mx.array:
    """Matrices are drawn anew, so large that attention is sharp; vectors are kept as the model made them."""
    if parameter.ndim < 2:
        return parameter
    gain = 4.0 if path.endswith("lm_head.weight") else 2.0
    return mx.random.normal(parameter.shape) * (gain / (parameter.size // parameter.shape[0]) ** 0.5)
