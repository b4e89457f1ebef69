"""Vectors and scores are those of the reference, alone and in batches; what cannot be loaded says so in one line."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from omlx.errors import ModelError
from omlx.model.encoder import load_encoder
from omlx.model.model_kind import model_kind
from omlx.request import EncoderInput
from omlx.testing import make_tiny_model
from tests.embeddings.tiny import CLS, POSITIONS, SEP, Reference, ids_of, make_tiny_encoder

TEXTS = ["a", "hello world", "the quick brown fox jumps over the lazy dog", "zz Top!", "x" * 90]


# ---- the real model


def test_the_real_model_gives_what_pytorch_gives(embedder_dir):
    """reference.json was made by transformers and PyTorch, see reference.py."""
    reference = json.loads(Path(__file__).with_name("reference.json").read_bytes())
    encoder = load_encoder(embedder_dir)
    assert (encoder.kind, encoder.dimensions, encoder.context_length) == ("embedding", 384, 256)
    inputs = encoder.tokenize(reference["texts"])
    assert max(len(item.ids) for item in inputs) > 200  # beyond the truncation in the tokenizer's file
    vectors = encoder.run(inputs)
    np.testing.assert_allclose(vectors, reference["vectors"], rtol=0, atol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=0, atol=1e-5)
    for item, row in zip(inputs, vectors, strict=True):
        np.testing.assert_allclose(encoder.run([item])[0], row, rtol=0, atol=1e-5)


# ---- tiny ones against numpy


@pytest.mark.parametrize("pooling", [None, "mean_tokens", "cls_token"])
def test_vectors_are_those_of_the_reference_alone_and_in_a_batch(tmp_path, pooling):
    folder = make_tiny_encoder(tmp_path / "m", pooling=pooling)
    encoder, reference = load_encoder(folder), Reference(folder)
    expected = [reference.vector(text, "cls" if pooling == "cls_token" else "mean") for text in TEXTS]
    inputs = encoder.tokenize(TEXTS)
    np.testing.assert_allclose(encoder.run(inputs), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose([encoder.run([item])[0] for item in inputs], expected, rtol=0, atol=1e-5)


def test_scores_tell_question_and_document_apart(tiny_reranker_dir):
    encoder, reference = load_encoder(tiny_reranker_dir), Reference(tiny_reranker_dir)
    assert (encoder.kind, encoder.dimensions) == ("rerank", 1)
    pairs = [("who", text) for text in TEXTS] + [("xy", "z"), ("x", "yz")]
    logits = encoder.run(encoder.tokenize(pairs))[:, 0]
    expected = [reference.score(query, document) for query, document in pairs]
    np.testing.assert_allclose(1 / (1 + np.exp(-logits.astype(np.float64))), expected, rtol=0, atol=1e-5)
    assert len(set(expected)) == len(expected)


# ---- tokens


def test_a_text_is_neither_cut_nor_padded_unless_asked_for(tiny_encoder_dir):
    """The file of the tiny tokenizer would do both."""
    encoder = load_encoder(tiny_encoder_dir)
    assert encoder.context_length == POSITIONS
    short, long = encoder.tokenize(["ab", "c" * 200])
    assert short == EncoderInput([CLS, *ids_of("ab"), SEP])
    assert len(long.ids) == 202
    (cut,) = encoder.tokenize(["c" * 200], cut=True)
    assert cut.ids == [CLS, *ids_of("c" * (POSITIONS - 2)), SEP]


def test_of_a_pair_the_document_is_cut_and_never_the_question(tiny_reranker_dir):
    encoder = load_encoder(tiny_reranker_dir)
    (pair,) = encoder.tokenize([("q" * 40, "d" * 200)], cut=True)
    assert pair.ids == [CLS, *ids_of("q" * 40), SEP, *ids_of("d" * (POSITIONS - 43)), SEP]
    assert pair.types == [0] * 42 + [1] * (POSITIONS - 42)
    with pytest.raises(ValueError, match="too short"):
        encoder.tokenize([("q" * 200, "d")], cut=True)


def test_many_characters_are_tokenized_in_portions_and_in_order(tiny_encoder_dir, monkeypatch):
    monkeypatch.setattr("omlx.model.encoder._CHARACTERS_AT_A_TIME", 20)
    texts = [letter * length for letter, length in zip("abcdefghij", range(1, 60, 6), strict=True)]
    found = load_encoder(tiny_encoder_dir).tokenize(texts)
    assert [item.ids[1:-1] for item in found] == [ids_of(text) for text in texts]


def test_the_length_that_a_model_was_trained_on_is_its_limit(tmp_path):
    folder = make_tiny_encoder(tmp_path / "m")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    assert load_encoder(folder).context_length == 40
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 4000}')
    assert load_encoder(folder).context_length == POSITIONS


# ---- what a folder is for


def test_a_folder_says_what_it_is_for(tmp_path, tiny_model_dir, tiny_encoder_dir, tiny_reranker_dir):
    assert model_kind(tiny_model_dir) == "text"
    assert model_kind(tiny_encoder_dir) == "embedding"
    assert model_kind(tiny_reranker_dir) == "rerank"
    chat = make_tiny_model(tmp_path / "trained-for-embeddings")
    (chat / "modules.json").write_text("[]")
    assert model_kind(chat) == "embedding"
    (chat / "config.json").write_text("{")
    assert model_kind(chat) == "text"


# ---- what cannot be used


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as error:
        load_encoder(folder)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)
    return str(error.value)


def test_what_cannot_be_loaded_is_one_line(tmp_path):
    assert "weightedmean" in refusal(make_tiny_encoder(tmp_path / "a", pooling="weightedmean_tokens"))
    three = {"id2label": {"0": "a", "1": "b", "2": "c"}}
    assert "exactly one output label" in refusal(make_tiny_encoder(tmp_path / "b", "rerank", **three))
    unknown = make_tiny_encoder(tmp_path / "c", model_type="nonsense")
    (unknown / "modules.json").write_text("[]")
    assert "nonsense" in refusal(unknown)
    without = make_tiny_encoder(tmp_path / "d")
    (without / "tokenizer.json").unlink()
    assert "no tokenizer.json" in refusal(without)
    damaged = make_tiny_encoder(tmp_path / "e")
    (damaged / "tokenizer.json").write_text("{}")
    refusal(damaged)
    short = make_tiny_encoder(tmp_path / "f")
    weights = short / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert "unfinished download" in refusal(short)


def test_weights_of_a_layer_that_is_not_known_are_no_silent_loss(tmp_path):
    """sentence-transformers may put a dense layer behind the pooling, in a folder of its own."""
    folder = make_tiny_encoder(tmp_path / "m")
    modules = [{"path": "", "type": "st.models.Transformer"}, {"path": "2_Dense", "type": "st.models.Dense"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    assert "'2_Dense' that has no model.safetensors" in refusal(folder)
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert "2_Dense" in refusal(folder)


def test_without_the_extra_the_error_says_what_to_install(tiny_encoder_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx_vlm.embedding_loader", None)
    with pytest.raises(ModelError, match=r"pip install 'omlx\[vision\]'"):
        load_encoder(tiny_encoder_dir)
