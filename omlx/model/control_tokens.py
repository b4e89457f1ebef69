"""Special tokens that a client wrote, kept apart from those of the chat template.

A user who writes `<|im_end|>` must not end a turn. Before the template runs, such texts are replaced by placeholders
in all that the client sent; what the rendered prompt holds of these tokens afterwards is the template's own. Then the
prompt is encoded by a tokenizer that differs from the model's in the names of these tokens alone: the template's
are written by the other names, the client's are ordinary text to it. So there is one pass over the whole text, and
merges, normalization and white space are as ever.
"""

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# What an added token that is not special has to look like to be a mark: others are vocabulary, as Gemma's "\n\n".
_MARK = re.compile(r"[<\[][^\s].*[>\]]", re.DOTALL)


Literals = Mapping[str, str] | None


class RenderedPrompt(NamedTuple):
    """A conversation as a chat template wrote it.

    `literals`: the placeholders in `text`, and what the client wrote there. None if the client wrote nothing that
    looks like a special token: then the text is encoded as it is.
    """

    text: str
    literals: Literals = None

    @property
    def plain(self) -> str:
        """The text without placeholders."""
        return "".join(piece for piece, _ in self.pieces())

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """The parts of the text, and whether the client wrote them in place of a special token."""
        if not self.literals:
            yield self.text, False
            return
        # Templates may change the case of what they write.
        parts = re.split(f"({'|'.join(map(re.escape, self.literals))})", self.text, flags=re.IGNORECASE)
        for at, part in enumerate(parts):
            literal = at % 2 == 1
            yield (self.literals[part.lower()] if literal else part), literal


class Sanitized(NamedTuple):
    """What goes to the template; see `RenderedPrompt` for the literals."""

    messages: list[dict[str, Any]]
    args: dict[str, Any]
    tools: tuple[dict[str, Any], ...]
    literals: Literals


class ControlTokens:
    """The tokens of one tokenizer that only the chat template may write.

    These are the special tokens, `marks`, and those added tokens in brackets that the template writes (`<think>`,
    `<tool_call>`). The text of an assistant's message keeps the latter: some templates look for them there. For any
    thread.
    """

    def __init__(self, tokenizer: Any, template: str, marks: Iterable[str] = ()) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        special = {token.content for token in added.values() if token.special} | {*tokenizer.all_special_tokens, *marks}
        written = {text for text in (token.content for token in added.values()) if text in template}
        special = {text for text in special if text.strip()}
        every = special | {text for text in written if _MARK.fullmatch(text)}
        self._texts = every
        self._special = _Finder(special)
        self._any = _Finder(every)
        self._backend = _backend(tokenizer)
        self._normalizer = None if self._backend is None else self._backend.normalizer
        self._twin: _Twin | None = None

    def sanitized(
        self, messages: Sequence[dict[str, Any]], args: dict[str, Any], tools: Sequence[dict[str, Any]]
    ) -> Sanitized:
        """The same with placeholders for the texts of control tokens."""
        given = [messages, args, tools]
        if not any(map(self._suspicious, _strings(given))):
            return Sanitized(list(messages), args, tuple(tools), None)
        literals = _Placeholders(given)
        return Sanitized(
            [self._message(message, literals) for message in messages],
            self._any.replaced(args, literals),
            tuple(self._any.replaced(tool, literals) for tool in tools),
            literals.texts,
        )

    def _suspicious(self, text: str) -> bool:
        if self._any.finds(text):
            return True
        # A normalizer may turn other characters into a token's.
        return self._normalizer is not None and self._any.finds(self._normalizer.normalize_str(text))

    def _message(self, message: dict[str, Any], literals: "_Placeholders") -> dict[str, Any]:
        safe: dict[str, Any] = self._any.replaced(message, literals)
        if message.get("role") == "assistant" and message.get("content"):
            safe["content"] = self._special.replaced(message["content"], literals)
        return safe

    def encode(self, prompt: RenderedPrompt, *, special: bool = False) -> list[int]:
        """Token ids; `special`: with those that begin every text."""
        if prompt.literals is None:
            return list(self._tokenizer.encode(prompt.text, add_special_tokens=special))
        if self._backend is None:
            return self._encoded_in_pieces(prompt, special=special)
        if self._twin is None:
            self._twin = _Twin(self._backend, self._any, self._tokenizer.unk_token_id)
        return self._twin.encode(prompt, special=special)

    def _encoded_in_pieces(self, prompt: RenderedPrompt, *, special: bool) -> list[int]:
        """For tokenizers of other kinds: the client's texts character by character, the rest piece by piece."""
        ids = list(self._tokenizer.encode("")) if special else []
        for piece, literal in prompt.pieces():
            for text in piece if literal else [piece]:
                ids += self._tokenizer.encode(text, add_special_tokens=False)
        return ids


class _Twin:
    """A tokenizer with the model of another one, whose control tokens have names that nobody can guess."""

    def __init__(self, backend: Tokenizer, control: "_Finder", unknown: int | None) -> None:
        self._model = backend.model
        self._control = control
        prefix = secrets.token_hex(16)
        added = backend.get_added_tokens_decoder()
        # Private-use characters around it: no letters that a neighboring word could be one with.
        names = {
            token.content: f"\ue000{prefix}{number}\ue000" if token.content in control.texts else token.content
            for number, token in added.items()
        }
        self._names = {text: name for text, name in names.items() if text != name}
        self._tokenizer = twin = Tokenizer(backend.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if getattr(backend, part) is not None:
                setattr(twin, part, getattr(backend, part))
        twin.add_tokens([_renamed(added[number], names, backend.normalizer) for number in sorted(added)])
        self._numbers = {twin.token_to_id(names[token.content]): number for number, token in added.items()}
        # The twin numbers its added tokens itself; in a vocabulary with holes a model's token may have such a number.
        self._twice = {
            twin.token_to_id(name): name
            for name in self._names.values()
            if backend.model.id_to_token(twin.token_to_id(name)) is not None
        }
        self._forged = {number for number, token in added.items() if token.content in control.texts} - {unknown}

    def encode(self, prompt: RenderedPrompt, *, special: bool) -> list[int]:
        text = "".join(
            piece if literal else self._control.pattern.sub(lambda found: self._names.get(found[0], found[0]), piece)
            for piece, literal in prompt.pieces()
        )
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=special)[0]
        ids: list[int] = []
        for token, name, begins in zip(encoding.ids, encoding.tokens, encoding.special_tokens_mask, strict=True):
            if begins:
                ids.append(token)
            elif token in self._numbers and self._twice.get(token, "") in name:
                ids.append(self._numbers[token])
            elif token in self._forged:  # the model's merges or pieces make it of plain text
                ids += [part.id for character in name for part in self._model.tokenize(character)]
            else:
                ids.append(token)
        return ids


def _renamed(token: AddedToken, names: Mapping[str, str], normalizer: Any) -> AddedToken:
    name = names[token.content]
    # What a normalizer changes, as one that adds a space in front, is not found inside a text: its name would be text.
    found = normalizer is None or normalizer.normalize_str(name) == name
    return AddedToken(
        name,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized and found,
        special=token.special,
    )


def _backend(tokenizer: Any) -> Tokenizer | None:
    """The Rust tokenizer, if it is what encodes texts."""
    inner = tokenizer._tokenizer if isinstance(tokenizer, TokenizerWrapper) else tokenizer
    plain = PreTrainedTokenizerFast, PreTrainedTokenizerBase
    if not isinstance(inner, PreTrainedTokenizerFast) or type(inner).encode is not plain[1].encode:
        return None
    return inner.backend_tokenizer if type(inner)._encode_plus is plain[0]._encode_plus else None


# ---- finding


class _Finder:
    """Finds texts in strings, and what of a string's end could become one with the string that follows it."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(texts)
        self.pattern = re.compile(_alternatives(self.texts) if self.texts else r"(?!)")
        self._joined = "\0".join(sorted(self.texts))
        self._begins = frozenset(text[:end] for text in self.texts for end in range(1, len(text)))
        self._firsts = frozenset(text[0] for text in self.texts)
        self._longest = max(map(len, self.texts), default=0)

    def finds(self, text: str) -> bool:
        return self._is_part(text) or self.pattern.search(text) is not None or self._begun(text) is not None

    def _is_part(self, text: str) -> bool:
        """Whether it is the inner part of a token, which a template could write between brackets."""
        return 0 < len(text) < self._longest and not re.fullmatch(r"\w*", text) and text in self._joined

    def _begun(self, text: str) -> int | None:
        """Where a token begins that the string does not end. Templates may strip the white space after it."""
        end = len(text.rstrip())
        start = max(0, end - self._longest)
        for at in range(start, end):
            if text[at] in self._firsts and text[at:end] in self._begins:
                return at
        return None

    def replaced(self, value: Any, literals: "_Placeholders") -> Any:
        """The value with placeholders in all its strings, names of members included."""
        if isinstance(value, str):
            return self._replaced(value, literals)
        if isinstance(value, dict):
            return {self._replaced(key, literals): self.replaced(item, literals) for key, item in value.items()}
        return [self.replaced(item, literals) for item in value] if isinstance(value, list | tuple) else value

    def _replaced(self, text: str, literals: "_Placeholders") -> str:
        if self._is_part(text):
            return literals.of(text)
        begun = self._begun(text)
        if begun is not None:
            end = len(text.rstrip())
            text = text[:begun] + literals.of(text[begun:end]) + text[end:]
        return self.pattern.sub(lambda found: literals.of(found[0]), text)


def _alternatives(texts: Iterable[str]) -> str:
    """A pattern of all the texts, the longest first, that looks at each character once."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _branches(tree)


def _branches(node: dict[str, Any]) -> str:
    run = ""
    while len(node) == 1 and "" not in node:
        [(character, node)] = node.items()
        run += re.escape(character)
    parts = [re.escape(character) + _branches(after) for character, after in sorted(node.items()) if character]
    if not parts:
        return run
    return f"{run}(?:{'|'.join(parts)}){'?' if '' in node else ''}"


class _Placeholders:
    """A placeholder for each text, of lower-case letters and digits: no template escapes or strips them.

    What they begin with occurs nowhere in `given`.
    """

    def __init__(self, given: Any) -> None:
        strings, number = "\0".join(_strings(given)).lower(), 0
        while f"omlx{number}z" in strings:
            number += 1
        self._prefix = f"omlx{number}z"
        self._known: dict[str, str] = {}

    def of(self, text: str) -> str:
        return self._known.setdefault(text, f"{self._prefix}{len(self._known)}z")

    @property
    def texts(self) -> dict[str, str]:
        return {placeholder: text for text, placeholder in self._known.items()}


def _strings(value: Any) -> Iterator[str]:
    """All strings of a value, names of members included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


# ---- one for each tokenizer


class _Known(NamedTuple):
    template: Any
    size: int
    tokens: ControlTokens


_KNOWN: "WeakKeyDictionary[Any, dict[frozenset[str], _Known]]" = WeakKeyDictionary()


def control_tokens(tokenizer: Any, marks: frozenset[str] = frozenset()) -> ControlTokens:
    """The control tokens of a tokenizer, `marks` among them. Made once for each."""
    template, size = getattr(tokenizer, "chat_template", None), len(tokenizer)
    every = _KNOWN.setdefault(tokenizer, {})
    known = every.get(marks)
    if known is None or known.template != template or known.size != size:
        text = "\0".join(template.values()) if isinstance(template, dict) else str(template or "")
        known = every[marks] = _Known(template, size, ControlTokens(tokenizer, text, marks))
    return known.tokens
