"""Real tokenizers of the two common kinds, made here: no weights, no downloads."""

import importlib
from collections.abc import Sequence

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' and message.content == 'refuse' %}{{ raise_exception('no such turn') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}\n"
    "{% endfor %}"
    "{% if style %}[{{ style }}]{% endif %}{% if reasoning_effort %}({{ reasoning_effort }}){% endif %}"
    "{% if enable_thinking %}(thinks){% endif %}"
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
    return SmallTokenizer(tokenizer_object=_bytes(), eos_token="<eos>", chat_template=chat_template)


def _bytes() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate([*alphabet, "Ġt", "<eos>"])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "t")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    return raw


def sentence_piece() -> SmallTokenizer:
    """Pieces with the underscore for a space, and byte tokens for all that is no piece, as in Llama 2."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "!", "e", "n", "d"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    raw.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])  # fmt: skip
    return SmallTokenizer(tokenizer_object=raw, eos_token="</s>")


TOOL_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}{{ '</tools>\n' }}{% endif %}"
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.reasoning_content and (keep or loop.last) %}"
    "<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    """{{ '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}"""
    "{{ (call.function.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}"
    "{% if message.name %}({{ message.name }}){% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking and opens %}{{ '<think>\n' }}{% endif %}{% endif %}"
)


def with_tools(*, thinks: bool = False, template: str = TOOL_TEMPLATE) -> TokenizerWrapper:
    """A model whose template knows tools (calls in JSON) and, if it `thinks`, has marks for that in its vocabulary."""
    if not thinks:
        template = template.replace("<think>", "[").replace("</think>", "]")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_bytes(), eos_token="<eos>", chat_template=template, clean_up_tokenization_spaces=False
    )
    if thinks:
        tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)
    return TokenizerWrapper(
        tokenizer,
        tool_call_start=json_tools.tool_call_start,
        tool_call_end=json_tools.tool_call_end,
        tool_parser=json_tools.parse_tool_call,
    )


def with_marks(template: str, tokens: Sequence[str] = (), parser: str | None = None) -> TokenizerWrapper:
    """A model with this template, these added tokens and, if one is named, mlx-lm's tool parser of that name."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_bytes(), eos_token="<eos>", chat_template=template, clean_up_tokenization_spaces=False
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in tokens])
    if parser is None:
        return TokenizerWrapper(tokenizer)
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    return TokenizerWrapper(
        tokenizer,
        tool_call_start=module.tool_call_start,
        tool_call_end=module.tool_call_end,
        tool_parser=module.parse_tool_call,
    )
