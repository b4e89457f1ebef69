"""From the messages and blocks of the Anthropic dialect to a conversation for the chat template."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from omlx.api.anthropic_body import CountBody, Message
from omlx.api.chat import ImagePart
from omlx.api.openai_content import TEXT_KINDS
from omlx.api.openai_tools import with_names
from omlx.api.tool_content import brought_line, on_lines, result_content
from omlx.errors import BadRequest

# Before the id that a call has in the model's own format: templates may want to see that one again.
_CALL_PREFIX = "toolu_"
_HEX_PREFIX = "toolu_hex-"


class _Block(NamedTuple):
    """A block of a message, and its place in the body for messages about it."""

    place: str
    given: dict[str, Any]

    @property
    def kind(self) -> Any:
        kind = self.given.get("type")
        return "text" if kind == "" or (isinstance(kind, str) and kind in TEXT_KINDS) else kind

    def text(self, name: str = "text") -> str:
        return self.value(name, str, "a text")

    def value(self, name: str, kind: type, what: str) -> Any:
        """A member of the block. Raises BadRequest for one of another type."""
        value = self.given.get(name)
        if not isinstance(value, kind):
            raise self.wrong(f"{name} has to be {what}")
        return value

    def wrong(self, what: str) -> BadRequest:
        return BadRequest(f"{self.place}: {what}", param=self.place)

    def refused(self, where: str) -> BadRequest:
        kind = self.kind
        if not isinstance(kind, str):
            return self.wrong('expected {"type": "...", ...}')
        error = self.wrong(f"{kind[:80]!r} blocks are not supported {where}")
        error.code = "unsupported_parameter"
        return error


def told_id(call_id: str) -> str:
    """The id of a call as clients are told, who take no other characters than these."""
    if re.fullmatch(r"[a-zA-Z0-9_-]+", call_id):
        return _CALL_PREFIX + call_id
    return _HEX_PREFIX + call_id.encode().hex()


def own_id(told: str) -> str:
    """The id that a call had before it was told; that of another server's call without its prefix."""
    if told.startswith(_HEX_PREFIX):
        with suppress(ValueError):
            return bytes.fromhex(told.removeprefix(_HEX_PREFIX)).decode()
    return told.removeprefix(_CALL_PREFIX)


def conversation(fields: CountBody) -> tuple[list[dict[str, Any]], tuple[ImagePart, ...]]:
    """The messages for the template, and their images. Raises BadRequest, which names the block.

    Neighbours of one role are one turn. Results of tools come before what else the user says in the same turn, and the
    images of results behind them: templates know texts there.
    """
    messages: list[dict[str, Any]] = []
    images: list[ImagePart] = []
    if fields.system is not None:
        text = _system(_blocks(fields.system, "system"))
        messages += [{"role": "system", "content": text}] if text else []
    for role, blocks in _turns(fields.messages):
        if role == "user":
            messages += _UserTurn(images).messages(blocks)
        else:
            messages.append(_assistant(blocks) if role == "assistant" else {"role": role, "content": _system(blocks)})
    return with_names(messages), tuple(images)


def _turns(messages: Sequence[Message]) -> list[tuple[str, list[_Block]]]:
    turns: list[tuple[str, list[_Block]]] = []
    for index, message in enumerate(messages):
        path = f"messages[{index}].content"
        if message.role != "assistant" and message.content in (None, []):
            raise BadRequest(f"{path}: a text or a list of blocks is required", param=path)
        blocks = _blocks(message.content or [], path)
        if turns and turns[-1][0] == message.role != "system":
            turns[-1][1].extend(blocks)
        else:
            turns.append((message.role, blocks))
    return turns


def _blocks(content: str | list[dict[str, Any]], path: str) -> list[_Block]:
    """A text is shorthand for one block."""
    if isinstance(content, str):
        return [_Block(path, {"type": "text", "text": content})]
    return [_Block(f"{path}[{index}]", block) for index, block in enumerate(content)]


def _system(blocks: Sequence[_Block]) -> str:
    for block in blocks:
        if block.kind != "text":
            raise block.refused("in system messages")
    return on_lines(block.text() for block in blocks)


# ---- the user's turn


@dataclass
class _UserTurn:
    """Collects the messages of one turn; images are added to `images` in their order."""

    images: list[ImagePart]
    _done: list[dict[str, Any]] = field(default_factory=list)
    _parts: list[dict[str, Any]] = field(default_factory=list)

    def messages(self, blocks: Sequence[_Block]) -> list[dict[str, Any]]:
        for block in blocks:
            self._take(block)
        self._flush()
        return self._done

    def _take(self, block: _Block) -> None:
        if block.kind == "tool_result":
            if self._parts:
                self._flush()
            self._done.append(self._result(block))
            return
        self._parts.append(self._part(block))

    def _flush(self) -> None:
        if self._parts:
            self._done.append({"role": "user", "content": _content(self._parts)})
        self._parts = []

    def _result(self, block: _Block) -> dict[str, Any]:
        given = block.given.get("content")
        if not (given is None or isinstance(given, str | list)):
            raise block.wrong("content has to be a text or a list of blocks")
        content = result_content(given, f"{block.place}.content", self.images)
        failed = block.given.get("is_error")
        if failed is not None and not isinstance(failed, bool):
            raise block.wrong("is_error has to be true or false")
        if failed and isinstance(content, str):
            content = f"Error: {content}"
        elif failed:
            content = [{"type": "text", "text": "Error:"}, *content]
        return {"role": "tool", "content": content, "tool_call_id": own_id(block.text("tool_use_id"))}

    def _part(self, block: _Block) -> dict[str, Any]:
        """A part of a message as templates take it."""
        if block.kind == "image":
            self.images.append(ImagePart(_image_url(block), block.place))
            return {"type": "image"}
        written = _WRITTEN.get(block.kind) if isinstance(block.kind, str) else None
        if written is not None:
            return {"type": "text", "text": written(block)}
        if isinstance(block.kind, str) and (block.kind in _BROUGHT or block.kind.endswith("_tool_result")):
            return {"type": "text", "text": brought_line(block.given)}
        raise block.refused("in messages of the user")


# Blocks of other servers' sessions that a client leaves in messages of the user.
_BROUGHT = ("tool_reference", "container_upload", "compaction")


def _checked(blocks: Sequence[_Block]) -> Sequence[_Block]:
    for block in blocks:
        if not isinstance(block.given, dict):
            raise block.wrong('expected {"type": "...", ...}')
    return blocks


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """One text, or, with images, the parts."""
    if any(part["type"] == "image" for part in parts):
        return parts
    return on_lines(part["text"] for part in parts)


def _image_url(block: _Block) -> str:
    source = block.value("source", dict, "an object")
    kind, data, url = source.get("type"), source.get("data"), source.get("url")
    if kind == "base64" and isinstance(data, str):
        return f"data:;base64,{data}"  # what it is, its content says
    if kind == "url" and isinstance(url, str) and url:
        return url
    raise block.wrong("source has to be of the type base64 (with data) or url (with url)")


def _document(block: _Block) -> str:
    """A text document; others (PDF) cannot be read here."""
    source = block.value("source", dict, "an object")
    if source.get("type") != "text" or not isinstance(source.get("data"), str):
        raise block.wrong("documents are taken as plain text only: source has to be of the type text, with data")
    return on_lines([_label(block, "title"), _label(block, "context"), source["data"]])


def _search_result(block: _Block) -> str:
    texts = block.value("content", list, "a list of text blocks")
    inner = _checked([_Block(f"{block.place}.content[{index}]", text) for index, text in enumerate(texts)])
    return on_lines([block.text("title"), block.text("source"), _system(inner)])


def _label(block: _Block, name: str) -> str:
    return "" if block.given.get(name) is None else block.text(name)


_WRITTEN: dict[str, Callable[[_Block], str]] = {
    "text": _Block.text,
    "document": _document,
    "search_result": _search_result,
}


# ---- the assistant's turn


def _assistant(blocks: Sequence[_Block]) -> dict[str, Any]:
    """A past answer. What of its thinking is encrypted has no text."""
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block.kind:
            case "text":
                texts.append(block.text())
            case "thinking":
                thoughts.append(block.text("thinking"))
            case "tool_use":
                calls.append(_call(block))
            case str():
                texts += filter(None, [brought_line(block.given)])
            case _:
                raise block.refused("in messages of the assistant")
    message: dict[str, Any] = {"role": "assistant", "content": on_lines(texts)}
    if reasoning := on_lines(thoughts):
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": calls} if calls else {})


def _call(block: _Block) -> dict[str, Any]:
    arguments = {} if block.given.get("input") is None else block.value("input", dict, "an object")
    name = block.text("name")
    if not name or len(name) > 200:
        raise block.wrong("name has to have 1 to 200 characters")
    function = {"name": name, "arguments": arguments}
    return {"id": own_id(block.text("id")), "type": "function", "function": function}
