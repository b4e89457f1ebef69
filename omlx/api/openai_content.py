"""The content of messages, a text or parts, as OpenAI's two chat endpoints have it; they name the parts differently."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from omlx.api.chat import ImagePart
from omlx.errors import BadRequest


class PartKinds(NamedTuple):
    """What an endpoint calls its parts: `texts` by type, with the field that holds the text; `image` is another type.

    `refused` are types that it has as well, but that cannot be taken here.
    """

    texts: Mapping[str, str]
    image: str
    refused: tuple[str, ...]


# Every dialect takes the others' names of a text: agents carry sessions from one to another.
TEXT_KINDS = ("text", "input_text", "output_text")
CHAT_PARTS = PartKinds(dict.fromkeys(TEXT_KINDS, "text"), "image_url", ("input_audio", "file", "refusal"))


def text_of(content: str | list[dict[str, Any]] | None, path: str, kinds: PartKinds = CHAT_PARTS) -> str:
    """The text of a message; parts are put on lines of their own. Raises BadRequest, which names the part."""
    if content is None or content == []:
        raise BadRequest(f"{path}: a text is required", param=path)
    if isinstance(content, str):
        return content
    return "\n".join(_text(part, f"{path}[{index}]", kinds) for index, part in enumerate(content))


def content_of(
    content: str | list[dict[str, Any]] | None, path: str, images: list[ImagePart], kinds: PartKinds = CHAT_PARTS
) -> str | list[dict[str, Any]]:
    """A text, or, with images, the parts as templates of vision models take them; `images` gets what there is of them.

    Raises BadRequest, which names the part.
    """
    if isinstance(content, str) or content is None or all(part.get("type") != kinds.image for part in content):
        return text_of(content, path, kinds)
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        place = f"{path}[{index}]"
        if part.get("type") == kinds.image:
            images.append(ImagePart(_image_url(part, place), place))
            parts.append({"type": "image"})
        else:
            parts.append({"type": "text", "text": _text(part, place, kinds)})
    return parts


def _image_url(part: dict[str, Any], path: str) -> str:
    """An object with `url` and `detail` in one endpoint (where many send the URL all the same), the URL in the other.

    `detail` changes nothing.
    """
    given = part.get("image_url")
    inside = given if isinstance(given, dict) else {"url": given, "detail": part.get("detail")}
    url = inside.get("url")
    if not isinstance(url, str) or not url:
        raise BadRequest(f'{path}: expected {{"type": "{part["type"]}", "image_url": ...}} with a URL', param=path)
    if inside.get("detail") not in (None, "auto", "low", "high", "original"):
        raise BadRequest(f"{path}: detail has to be auto, low or high", param=path)
    return url


def _text(part: dict[str, Any], path: str, kinds: PartKinds) -> str:
    kind = part.get("type") or "text"
    if kind == kinds.image:
        raise BadRequest(f"{path}: images are taken in messages of the user alone", param=path)
    if kind in kinds.refused:
        raise BadRequest(f"{path}: {kind} parts are not supported yet", param=path, code="unsupported_parameter")
    field = kinds.texts.get(kind) if isinstance(kind, str) else None
    if field is None or not isinstance(part.get(field), str):
        kind, field = next(iter(kinds.texts.items()))
        raise BadRequest(f'{path}: expected {{"type": "{kind}", "{field}": "..."}}', param=path)
    return str(part[field])
