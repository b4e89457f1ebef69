"""Real tokenizers of the two common kinds, made here: no weights, no downloads."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' and message.content == 'refuse' %}{{ raise_exception('no such turn') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}\n"
    "{% endfor %}"
    "{% if style %}[{{ style }}]{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class SmallTokenizer(PreTrainedTokenizerFast):
    """With the two attributes that mlx-lm's wrapper adds."""

    @property
    def eos_token_ids(self) -> set[int]:
        return {self.eos_token_id}

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None


def byte_level(chat_template: str | None = CHAT_TEMPLATE) -> SmallTokenizer:
    """One token a byte, as in GPT-2, and one merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate([*alphabet, "Ġt", "<eos>"])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "t")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    return SmallTokenizer(tokenizer_object=raw, eos_token="<eos>", chat_template=chat_template)


def sentence_piece() -> SmallTokenizer:
    """Pieces with the underscore for a space, and byte tokens for all that is no piece, as in Llama 2."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "!", "e", "n", "d"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    raw.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])  # fmt: skip
    return SmallTokenizer(tokenizer_object=raw, eos_token="</s>")
