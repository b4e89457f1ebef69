"""GGUF files become ordinary model folders that compute the same; what cannot be converted is said."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import rope_utils
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from omlx.errors import ModelError
from omlx.model import loader
from omlx.model.folder import models_folder
from omlx.model.gguf import convert, import_gguf
from omlx.model.gguf_file import read_header
from tests.model.gguf_writer import Tensor, plain, quantised, random_q6_k, write_gguf
from tests.model.tiny_gguf import tiny_gguf, tiny_metadata, tiny_tensors


def logits(model: loader.LoadedModel, tokens: list[int]) -> np.ndarray[Any, Any]:
    return np.array(model.model(mx.array([tokens])))


def test_a_converted_model_computes_what_the_original_does(tmp_path: Path, tiny_model_dir: Path) -> None:
    path = import_gguf(tiny_gguf(tmp_path / "My Tiny.gguf", tiny_model_dir), tmp_path)
    assert path == models_folder(tmp_path) / "my-tiny"
    assert sorted(file.name for file in path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    original, converted = loader.load(tiny_model_dir), loader.load(path)
    tokens = [104, 105, 10, 200, 33]
    # Floats are kept as float16.
    np.testing.assert_allclose(logits(converted, tokens), logits(original, tokens), rtol=0.02, atol=0.05)
    assert (converted.context_length, converted.vocab_size) == (original.context_length, original.vocab_size)
    assert converted.eos_token_ids == original.eos_token_ids


def test_its_tokenizer_does_what_the_original_does(tmp_path: Path, tiny_model_dir: Path) -> None:
    path = import_gguf(tiny_gguf(tmp_path / "tiny.gguf", tiny_model_dir), tmp_path)
    original, converted = loader.load(tiny_model_dir).tokenizer, loader.load(path).tokenizer
    messages = [{"role": "user", "content": "Grüße, 🎉 <|im_end|>"}]
    tokens = converted.apply_chat_template(messages, add_generation_prompt=True)
    assert tokens == original.apply_chat_template(messages, add_generation_prompt=True)
    assert converted.decode(tokens) == original.decode(tokens)


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q8_0", 8)])
def test_quantised_weights_stay_quantised_and_exact(tmp_path: Path, tiny_model_dir: Path, kind: str, bits: int) -> None:
    path = import_gguf(tiny_gguf(tmp_path / "tiny.gguf", tiny_model_dir, kind), tmp_path)
    config = json.loads((path / "config.json").read_text())
    assert config["quantization"] == {"group_size": 32, "bits": bits, "mode": "affine"}
    model = loader.load(path)
    array = load_file(tiny_model_dir / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    _, expected = quantised(array, kind)
    loaded = np.array(model.model.model.layers[1].mlp.down_proj.weight.astype(mx.float32))
    if model.dtype == "float32":
        np.testing.assert_array_equal(loaded, expected)


def test_layers_of_other_bits_are_told_to_mlx_lm(tmp_path: Path, tiny_model_dir: Path) -> None:
    tensors = tiny_tensors(tiny_model_dir, "Q4_1")
    tensors["token_embd.weight"] = tiny_tensors(tiny_model_dir, "Q8_0")["token_embd.weight"]
    file = write_gguf(tmp_path / "mixed.gguf", tiny_metadata(tiny_model_dir), tensors)
    path = import_gguf(file, tmp_path)
    quantization = json.loads((path / "config.json").read_text())["quantization"]
    assert quantization["bits"] == 4
    assert quantization["model.embed_tokens"] == {"group_size": 32, "bits": 8, "mode": "affine"}
    assert loader.load(path).vocab_size == 260


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_mlx_reads_plain_types(tmp_path: Path, kind: str) -> None:
    array = np.linspace(-3, 3, 64, dtype=np.float32).reshape(2, 32)
    file = write_gguf(tmp_path / "a.gguf", {}, {"a.weight": plain(array, kind)})
    read = mx.load(str(file))["a.weight"]
    np.testing.assert_allclose(np.array(read.astype(mx.float32)), array, rtol=0.01, atol=0.01)


def test_mlx_reads_q6_k(tmp_path: Path) -> None:
    tensor, values = random_q6_k(3, np.random.default_rng(0))
    read = mx.load(str(write_gguf(tmp_path / "a.gguf", {}, {"a.weight": tensor})))["a.weight"]
    np.testing.assert_allclose(np.array(read.astype(mx.float32)), values, rtol=2e-3, atol=1e-3)


def test_the_header_gives_metadata_types_and_shapes(tmp_path: Path) -> None:
    metadata = {"text": "a ä", "number": 7, "share": 0.5, "yes": True, "words": ["x", "yy"], "counts": [1, 2]}
    file = write_gguf(tmp_path / "a.gguf", metadata, {"a.weight": plain(np.zeros((2, 32)), "F16")})
    header = read_header(file)
    assert header.metadata == metadata
    assert header.tensors == {"a.weight": ("F16", (2, 32))}


UNSUPPORTED = [
    ({"general.architecture": "qwen2"}, "architecture 'qwen2' is not supported"),
    ({"llama.expert_count": 8}, "mixture-of-experts"),
    ({"split.count": 2}, "one part of several"),
    ({"tokenizer.ggml.model": "llama"}, "tokenizer kind 'llama' is not supported"),
    ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken' is not supported"),
    ({"tokenizer.ggml.merges": ["a b c"]}, "merges are damaged"),
    ({"tokenizer.ggml.eos_token_id": 99999}, "outside the vocabulary"),
    ({"llama.rope.scaling.type": "yarn"}, "position scaling 'yarn' is not supported"),
    ({"llama.attention.head_count": [4, 4]}, "head_count is not a number"),
    ({"llama.block_count": 3}, "tensors are missing"),
]


@pytest.mark.parametrize(("change", "reason"), UNSUPPORTED)
def test_what_is_not_supported_is_said_and_leaves_nothing(
    tmp_path: Path, tiny_model_dir: Path, change: dict[str, Any], reason: str
) -> None:
    metadata = {**tiny_metadata(tiny_model_dir), **change}
    file = write_gguf(tmp_path / "odd.gguf", metadata, tiny_tensors(tiny_model_dir))
    with pytest.raises(ModelError, match=reason) as error:
        import_gguf(file, tmp_path)
    assert str(error.value).startswith("odd.gguf: ")
    assert "\n" not in str(error.value)
    assert [path.name for path in models_folder(tmp_path).iterdir()] == [".odd.lock"]


@pytest.mark.parametrize("kind", ["Q4_K", "unknown"])
def test_unreadable_tensor_types_are_named(tmp_path: Path, tiny_model_dir: Path, kind: str) -> None:
    tensors = tiny_tensors(tiny_model_dir)
    tensors["blk.0.ffn_up.weight"] = Tensor(kind, (128, 64), bytes(128 * 64))
    file = write_gguf(tmp_path / "odd.gguf", tiny_metadata(tiny_model_dir), tensors)
    shown = {"Q4_K": "Q4_K", "unknown": "type 99"}[kind]
    with pytest.raises(ModelError, match=f"tensors of type {shown} are not supported"):
        import_gguf(file, tmp_path)


def test_a_tensor_that_does_not_belong_is_named(tmp_path: Path, tiny_model_dir: Path) -> None:
    tensors = {**tiny_tensors(tiny_model_dir), "blk.0.attn_sinks.weight": plain(np.zeros(4))}
    file = write_gguf(tmp_path / "odd.gguf", tiny_metadata(tiny_model_dir), tensors)
    with pytest.raises(ModelError, match=r"'blk\.0\.attn_sinks\.weight' is not part of a llama model"):
        import_gguf(file, tmp_path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    data = tiny_gguf(tmp_path / "whole.gguf", tiny_model_dir).read_bytes()
    file = tmp_path / "cut.gguf"
    for length in (0, 3, 10, 30, 500, 5000, len(data) // 2, len(data) - 64):
        file.write_bytes(data[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            convert(file, tmp_path)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"PK\3\4" + bytes(100), "not a GGUF file"),
        (b"GGUF\1\0\0\0" + bytes(100), "version 1 is not supported"),
        (b"GGUF\3\0\0\0" + b"\xff" * 100, "damaged or truncated"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(data)
    with pytest.raises(ModelError, match=reason):
        import_gguf(file, tmp_path)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        import_gguf(tmp_path / "none.gguf", tmp_path)


def test_a_name_that_is_taken_is_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    file = tiny_gguf(tmp_path / "tiny.gguf", tiny_model_dir)
    import_gguf(file, tmp_path, "mine/tiny")
    with pytest.raises(ModelError, match="exists already"):
        import_gguf(file, tmp_path, "mine/tiny")
    with pytest.raises(ModelError, match="is not a model name"):
        import_gguf(file, tmp_path, "../tiny")


def llama3_factors(factor: float) -> np.ndarray[Any, Any]:
    """The tensor that converters write for Llama 3, worked out by mlx-lm's own rotation."""
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rope = rope_utils.initialize_rope(16, 500000.0, False, scaling, 131072)
    return np.array(rope._freqs) / 500000.0 ** (np.arange(0, 16, 2) / 16)


def test_llama3_position_scaling_is_recognised(tmp_path: Path, tiny_model_dir: Path) -> None:
    metadata = {**tiny_metadata(tiny_model_dir), "llama.rope.freq_base": 500000.0, "tokenizer.ggml.pre": "llama-bpe"}
    tensors = {**tiny_tensors(tiny_model_dir), "rope_freqs.weight": plain(llama3_factors(32.0))}
    path = import_gguf(write_gguf(tmp_path / "llama3.gguf", metadata, tensors), tmp_path)
    scaling = json.loads((path / "config.json").read_text())["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", 32.0)
    assert loader.load(path).tokenizer.encode("12345") == [49, 50, 51, 52, 53]


def test_other_position_factors_are_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    tensors = {**tiny_tensors(tiny_model_dir), "rope_freqs.weight": plain(np.arange(1, 9))}
    file = write_gguf(tmp_path / "a.gguf", tiny_metadata(tiny_model_dir), tensors)
    with pytest.raises(ModelError, match="is not that of Llama 3"):
        import_gguf(file, tmp_path)


def test_linear_position_scaling_is_passed_on(tmp_path: Path, tiny_model_dir: Path) -> None:
    metadata = {
        **tiny_metadata(tiny_model_dir),
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 2.0,
    }
    path = import_gguf(write_gguf(tmp_path / "a.gguf", metadata, tiny_tensors(tiny_model_dir)), tmp_path)
    assert json.loads((path / "config.json").read_text())["rope_scaling"]["factor"] == 2.0
    assert loader.load(path).context_length == 4096


def test_begin_of_text_and_digits_follow_the_file(tmp_path: Path, tiny_model_dir: Path) -> None:
    metadata = {
        **tiny_metadata(tiny_model_dir),
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.tokens": [*tiny_metadata(tiny_model_dir)["tokenizer.ggml.tokens"][:259], "12"],
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 3, 1],
        "tokenizer.ggml.merges": ["1 2"],
    }
    path = import_gguf(write_gguf(tmp_path / "a.gguf", metadata, tiny_tensors(tiny_model_dir)), tmp_path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    assert tokenizer.encode("12").ids == [257, 49, 50]
    assert tokenizer.encode("12", add_special_tokens=False).ids == [49, 50]
