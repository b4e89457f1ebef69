"""From messages with pictures to token ids, and where in them each picture is.

Text that a client wrote may hold the very characters that stand for a picture. Before the template runs they are
replaced by a sentinel, so the markers that are there afterwards are the template's own; then both are counted
through the tokenized prompt in order. What a client wrote stays ordinary tokens.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from omlx.errors import BadPicture, BadRequest
from omlx.model.chat_template import render
from omlx.model.foreign import refusing
from omlx.model.vision_family import Layout, Picture, VisionFamily

Messages = list[dict[str, Any]]

_NO_PICTURE = -1
_PROBES = ("first probe", "second probe", "third probe")


class PlacedImage(NamedTuple):
    """A picture in a prompt. `positions` are the indices of its features, in order; `digest` names it by content."""

    picture: Picture
    digest: bytes
    layout: Layout
    positions: npt.NDArray[np.int64]

    @property
    def start(self) -> int:
        return int(self.positions[0])

    @property
    def end(self) -> int:
        """The index behind the last of its positions."""
        return int(self.positions[-1]) + 1


class VisionTemplate:
    """A vision model's chat template, and whether it takes messages in parts, as text, or both.

    `most_chars`: a longer prompt cannot fit the model's context, whatever its tokens are.
    """

    def __init__(self, tokenizer: Any, name: str, family: VisionFamily, most_chars: int) -> None:
        self._tokenizer = tokenizer
        self._name = name
        self._family = family
        self._most_chars = most_chars
        self._takes_parts = self._marks_parts()
        self._takes_text = not self._takes_parts or self._shows_text()

    def _marks_parts(self) -> bool:
        """Whether the template writes one marker for a picture among a message's parts."""
        parts = [{"type": "image"}, {"type": "text", "text": _PROBES[0]}]
        shown = self._probe([{"role": "user", "content": parts}])
        return shown.count(self._family.marker) == 1 and _PROBES[0] in shown

    def _shows_text(self) -> bool:
        """Whether it takes messages that are just text as well: some look for parts and find none."""
        turns = zip(("user", "assistant", "user"), _PROBES, strict=True)
        shown = self._probe([{"role": role, "content": text} for role, text in turns])
        return all(text in shown for text in _PROBES)

    def _probe(self, messages: Messages) -> str:
        try:
            return render(self._tokenizer, self._name, messages, {})
        except BadRequest:
            return ""

    def tokens(
        self,
        messages: Messages,
        args: dict[str, Any],
        pictures: Sequence[Picture],
        tools: Sequence[dict[str, Any]] = (),
        *,
        ready: bool = True,
    ) -> tuple[list[int], list[PlacedImage]]:
        """Token ids of the conversation (`ready`: for the answer), and its pictures where they are.

        The k-th part {"type": "image"} of the messages is `pictures[k]`. `args` and `tools` go to the template. Takes
        a while for long texts; any thread. Raises BadRequest.
        """
        layouts = [self._layout(index, picture) for index, picture in enumerate(pictures)]
        self._check_length(sum(len(layout.text) for layout in layouts))
        strays = Strays([messages, args, list(tools)], {self._family.marker, self._family.image_token})
        safe = [self._message(message, strays) for message in messages]
        safe_args, safe_tools = strays.hidden(args), strays.hidden(list(tools))
        shown = render(self._tokenizer, self._name, safe, safe_args, safe_tools, ready=ready)
        text, labels = self._expanded(shown, strays, layouts)
        self._check_length(len(text))
        with refusing(f"model {self._name}: its tokenizer failed"):
            ids = self._begin(text) + list(self._tokenizer.encode(text, add_special_tokens=False))
        return ids, self._placed(ids, labels, pictures, layouts)

    def _layout(self, index: int, picture: Picture) -> Layout:
        try:
            return self._family.layout(picture.size)
        except BadRequest as error:
            raise BadPicture(index, str(error)) from error

    def _check_length(self, characters: int) -> None:
        if characters > self._most_chars:
            raise BadRequest(
                f"messages: {characters} characters, those of the images included, are more than the context of "
                f"model {self._name!r} can hold",
                param="messages",
                code="context_length_exceeded",
            )

    def _message(self, message: dict[str, Any], strays: "Strays") -> dict[str, Any]:
        """A message as the template takes it, what looks like a picture in its texts replaced."""
        safe: dict[str, Any] = strays.hidden(message)
        content = safe.get("content")
        if isinstance(content, list) and not self._takes_parts:
            # A message that begins with its pictures, as most do, has them in front of its text.
            parts = (self._family.literal if part.get("type") == "image" else part.get("text", "") for part in content)
            return safe | {"content": "\n".join(parts)}
        if isinstance(content, str) and not self._takes_text:
            return safe | {"content": [{"type": "text", "text": content}]}
        return safe

    def _expanded(self, shown: str, strays: "Strays", layouts: Sequence[Layout]) -> tuple[str, list[int]]:
        """The prompt's text with every picture's layout; for each image token in it whose it is."""
        pieces, labels, used = [], [], 0
        for piece in re.split(f"({'|'.join(map(re.escape, (self._family.marker, *strays.sentinels)))})", shown):
            if piece == self._family.marker:
                if used < len(layouts):
                    piece = layouts[used].text
                    labels += [used] * layouts[used].positions
                used += 1
            elif piece in strays.sentinels:
                piece = strays.sentinels[piece]
                labels += [_NO_PICTURE] * piece.count(self._family.image_token)
            pieces.append(piece)
        if used != len(layouts):
            raise BadRequest(
                f"the model's chat template has room for {used} images in these messages, which have {len(layouts)}",
                param="messages",
            )
        return "".join(pieces), labels

    def _begin(self, text: str) -> list[int]:
        """The token that begins every text, where the tokenizer adds one and the template has not written it.

        LLaVA's templates leave it to the tokenizer, as those of text models seldom do.
        """
        begin, token = self._tokenizer.bos_token_id, self._tokenizer.bos_token
        if begin is None or text.startswith(token) or list(self._tokenizer.encode("")) != [begin]:
            return []
        return [int(begin)]

    def _placed(
        self, ids: list[int], labels: list[int], pictures: Sequence[Picture], layouts: Sequence[Layout]
    ) -> list[PlacedImage]:
        if not pictures:
            return []
        places = np.flatnonzero(np.asarray(ids) == self._family.image_token_id)
        if len(places) != len(labels):
            raise BadRequest("the messages hold parts of what stands for images; leave them out", param="messages")
        if places[-1] == len(ids) - 1 and labels[-1] != _NO_PICTURE:
            raise BadRequest("an image is the very last of the prompt; the model answers to text", param="messages")
        whose = np.asarray(labels)
        return [
            PlacedImage(picture, self.digest(picture), layout, places[whose == number])
            for number, (picture, layout) in enumerate(zip(pictures, layouts, strict=True))
        ]

    def digest(self, picture: Picture) -> bytes:
        """32 bytes that name a picture as this model sees it: its pixels, and what is done to them."""
        return hashlib.sha256(b"omlx picture 1" + picture.pixel_digest + self._family.settings_digest).digest()


class Strays:
    """Texts that look like a picture to the tokenizer, and a sentinel for each that occurs nowhere in what was written.

    Sentinels are letters and digits, which no template escapes.
    """

    def __init__(self, written: Any, texts: set[str]) -> None:
        strings, number = "\0".join(_strings(written)), 0
        while f"omlx{number}z" in strings:
            number += 1
        self.sentinels = {f"omlx{number}z{chr(ord('a') + at)}z": text for at, text in enumerate(sorted(texts))}

    def hidden(self, value: Any) -> Any:
        """The value with those texts replaced in all its strings."""
        if isinstance(value, str):
            for sentinel, text in self.sentinels.items():
                value = value.replace(text, sentinel)
            return value
        if isinstance(value, dict):
            return {key: self.hidden(item) for key, item in value.items()}
        return [self.hidden(item) for item in value] if isinstance(value, list) else value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
