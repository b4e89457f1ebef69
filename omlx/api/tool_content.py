"""What tools returned, and what a conversation brings along that began on another server; for all dialects.

A client sends these again with each later request, so nothing here may refuse one: what the model cannot be shown
becomes a short line. The line depends on the content alone, so that prompts keep their prefixes.
"""

import base64
import binascii
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from omlx.api.chat import ChatPrompt, ImagePart
from omlx.model.images import Picture

SEES_NONE = "this model cannot see images"

_IMAGE_BELOW = "[image]"  # in a result, for an image that follows it
_MOST_SHOWN = 500  # characters of what another server's tool was asked
_TEXT_TYPES = ("json", "xml", "yaml", "toml", "javascript", "x-sh", "sql")

Part = dict[str, Any]


def on_lines(texts: Iterable[str]) -> str:
    """Texts, each beginning on a line of its own."""
    joined = ""
    for text in texts:
        apart = not joined or not text or joined.endswith("\n") or text.startswith("\n")
        joined += text if apart else f"\n{text}"
    return joined


def result_content(content: Any, place: str, images: list[ImagePart]) -> str | list[Part]:
    """The content of a tool's message: a text, or, with images, parts; `images` gets what there is of them.

    `content` is a text or parts of any dialect. `with_shown_results` makes texts of the parts.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_part(part, f"{place}[{index}]", images) for index, part in enumerate(content)]
    return parts if any(part["type"] == "image" for part in parts) else on_lines(part["text"] for part in parts)


def line(what: Any, why: str = "") -> str:
    """Stands for content that the model is not shown."""
    name = " ".join(str(what).split())[:80]
    return f"[{name} omitted: {why}]" if why else f"[{name} omitted]"


def shortened(value: Any) -> str:
    """A value of any kind as a short text."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."


# ---- parts


def _part(part: Any, place: str, images: list[ImagePart]) -> Part:
    if isinstance(part, str):
        return _text(part)
    if not isinstance(part, dict):
        return _text(line("content", "it is of an unknown form"))
    kind = part.get("type") or ("text" if "text" in part else "")
    if kind in ("image_url", "input_image", "image", "computer_screenshot"):
        url = _image_url(part)
        if url is None:
            return _text(line("image", "it has no data"))
        images.append(ImagePart(url, place, from_tool=True))
        return {"type": "image"}
    return _text(_written(part, kind))


def _text(text: str) -> Part:
    return {"type": "text", "text": text}


def _written(part: Part, kind: Any) -> str:
    match kind:
        case "text" | "input_text" | "output_text" | "refusal" | "reasoning_text":
            text = part.get("refusal" if kind == "refusal" else "text")
            return text if isinstance(text, str) else line("text", "it is of an unknown form")
        case "file" | "input_file" | "document" | "resource":
            return _file_text(part)
        case "search_result":
            return on_lines([*_texts_of(part, "title", "source"), *_inner(part)])
        case "tool_reference":
            return f"[tool: {shortened(part.get('tool_name'))}]"
        case "":
            return shortened(part)
        case _:
            return line(kind)


def _inner(part: Part) -> list[str]:
    """The texts of the parts that a part holds."""
    content = part.get("content")
    held = content if isinstance(content, list) else []
    return [_written(item, item.get("type") or "text") for item in held if isinstance(item, dict)]


def _texts_of(part: Part, *names: str) -> list[str]:
    return [value for name in names if isinstance(value := part.get(name), str) and value]


def _image_url(part: Part) -> str | None:
    """The URL of an image in any dialect's spelling, or a data: URL of its bytes."""
    given, source = part.get("image_url"), part.get("source")
    url = given.get("url") if isinstance(given, dict) else given
    data = part.get("data")  # as the Model Context Protocol has it
    if isinstance(source, dict):
        url, data = source.get("url"), source.get("data")
    if isinstance(url, str) and url:
        return url
    return f"data:;base64,{data}" if isinstance(data, str) and data else None


def _file_text(part: Part) -> str:
    """The text of a file, with its name before it; a line for a file that is no text."""
    inside = part
    for name in ("file", "source", "resource"):
        value = part.get(name)
        inside = inside | value if isinstance(value, dict) else inside
    names = _texts_of(inside, "filename", "title", "uri", "context")
    inner = _inner(inside)
    text = on_lines(inner) if inner else _decoded(inside)
    if text is None:
        return line(" ".join(["file", *names[:1]]), "only text can be read")
    return on_lines([*names, text])


def _decoded(file: Part) -> str | None:
    """The text of a file's data; None if it is not one."""
    if isinstance(file.get("text"), str):
        return str(file["text"])
    kind, data = file.get("media_type") or file.get("mimeType") or "", file.get("data") or file.get("file_data")
    if not isinstance(data, str) or not isinstance(kind, str):
        return None
    if file.get("type") == "text":
        return data
    if data.startswith("data:"):
        head, _, data = data.partition(",")
        kind = head.removeprefix("data:").removesuffix(";base64")
    if not (kind.startswith("text/") or any(name in kind for name in _TEXT_TYPES)):
        return None
    try:
        return base64.b64decode(data, validate=True).decode()
    except (binascii.Error, ValueError):
        return None


# ---- what other servers left


def brought_line(block: Part) -> str:
    """A text for a block or item that only another server knows; "" for what tells a model nothing."""
    kind, content = block.get("type"), block.get("content")
    if not isinstance(kind, str) or kind in _EMPTY:
        return ""
    if kind == "compaction" and isinstance(content, str):
        return content
    if kind.endswith("_result"):
        return shortened(on_lines([f"[{kind[:80]}]", *_found(content)]))
    request = next((block[name] for name in _REQUESTS if block.get(name) not in (None, "", {}, [])), None)
    name = block["name"] if isinstance(block.get("name"), str) else kind
    return line(kind) if request is None else f"[{name[:80]}: {shortened(request)}]"


# Requests and lists that the other server's own machinery needed.
_EMPTY = ("redacted_thinking", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response")
_REQUESTS = ("input", "action", "queries", "query", "arguments", "code", "prompt")


def _found(content: Any) -> list[str]:
    """Names and texts in another server's results."""
    if isinstance(content, str):
        return [content]
    items = content if isinstance(content, list) else [content]
    return [
        on_lines(_texts_of(item, "title", "url", "text", "stdout", "stderr", "error_code"))
        for item in items
        if isinstance(item, dict)
    ]


# ---- the messages


def with_shown_results(prompt: ChatPrompt, seen: Sequence[Picture | str]) -> ChatPrompt:
    """The prompt with texts as the contents of tools' messages; their images follow in a message of the user.

    `seen` has for each of the prompt's images the picture, or, for one of a tool that the model is not shown, why.
    """
    waiting = iter(zip(prompt.images, seen, strict=True))
    images: list[ImagePart] = []
    pictures: list[Picture] = []
    messages: list[dict[str, Any]] = []
    below = 0  # images of results that no message has yet

    def take(part: Part) -> str:
        """The text of a part, which is an image's place if it is shown."""
        if part["type"] != "image":
            return str(part["text"])
        image, picture = next(waiting)
        if isinstance(picture, str):
            return line("image", picture)
        images.append(image._replace(url=""))  # which may hold megabytes that are not needed any more
        pictures.append(picture)
        return _IMAGE_BELOW

    for message in prompt.messages:
        content, before = message["content"], len(pictures)
        parts = content if isinstance(content, list) else []
        texts = [take(part) for part in parts]
        if message["role"] == "tool":
            below += len(pictures) - before
            messages.append(message | {"content": on_lines(texts)} if parts else message)
            continue
        if below and message["role"] == "user":
            message = message | {"content": [*_places(below), *(parts or [_text(content)])]}
        elif below:
            messages.append({"role": "user", "content": _places(below)})
        below = 0
        messages.append(message)
    if below:
        messages.append({"role": "user", "content": _places(below)})
    return replace(prompt, messages=messages, images=tuple(images), pictures=tuple(pictures))


def _places(count: int) -> list[Part]:
    return [{"type": "image"} for _ in range(count)]
