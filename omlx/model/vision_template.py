"""From messages with pictures to token ids, and where in them each picture is.

Text that a client wrote may hold the very characters that stand for a picture. They are replaced by placeholders before
they come here (omlx.model.control_tokens), so the markers that are there after the template ran are its own.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from omlx.errors import BadPicture, BadRequest
from omlx.model.chat_template import render
from omlx.model.control_tokens import Literals, RenderedPrompt, control_tokens
from omlx.model.foreign import refusing
from omlx.model.vision_family import Layout, Picture, VisionFamily

Messages = list[dict[str, Any]]

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
        self.marks = frozenset({family.marker, family.image_token})
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
        literals: Literals = None,
        ready: bool = True,
    ) -> tuple[list[int], list[PlacedImage]]:
        """Token ids of the conversation (`ready`: for the answer), and its pictures where they are.

        The k-th part {"type": "image"} of the messages is `pictures[k]`. `args` and `tools` go to the template;
        `literals`: what the client wrote in place of placeholders in all of these. Takes a while for long texts; any
        thread. Raises BadRequest.
        """
        layouts = [self._layout(index, picture) for index, picture in enumerate(pictures)]
        self._check_length(sum(len(layout.text) for layout in layouts))
        shaped = [self._message(message) for message in messages]
        shown = render(self._tokenizer, self._name, shaped, args, tools, ready=ready)
        prompt = RenderedPrompt(self._expanded(shown, layouts), literals)
        self._check_length(len(prompt.plain))
        with refusing(f"model {self._name}: its tokenizer failed"):
            ids = self._begin(prompt.text) + control_tokens(self._tokenizer, self.marks).encode(prompt)
        return ids, self._placed(ids, pictures, layouts)

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

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as the template takes it."""
        content = message.get("content")
        if isinstance(content, list) and not self._takes_parts:
            # A message that begins with its pictures, as most do, has them in front of its text.
            parts = (self._family.literal if part.get("type") == "image" else part.get("text", "") for part in content)
            return message | {"content": "\n".join(parts)}
        if isinstance(content, str) and not self._takes_text:
            return message | {"content": [{"type": "text", "text": content}]}
        return message

    def _expanded(self, shown: str, layouts: Sequence[Layout]) -> str:
        """The prompt's text with every picture's layout."""
        first, *others = shown.split(self._family.marker)
        if len(others) != len(layouts):
            raise BadRequest(
                f"the model's chat template has room for {len(others)} images in these messages, "
                f"which have {len(layouts)}",
                param="messages",
            )
        return first + "".join(layout.text + text for layout, text in zip(layouts, others, strict=True))

    def _begin(self, text: str) -> list[int]:
        """The token that begins every text, where the tokenizer adds one and the template has not written it.

        LLaVA's templates leave it to the tokenizer, as those of text models seldom do.
        """
        begin, token = self._tokenizer.bos_token_id, self._tokenizer.bos_token
        if begin is None or text.startswith(token) or list(self._tokenizer.encode("")) != [begin]:
            return []
        return [int(begin)]

    def _placed(self, ids: list[int], pictures: Sequence[Picture], layouts: Sequence[Layout]) -> list[PlacedImage]:
        if not pictures:
            return []
        places = np.flatnonzero(np.asarray(ids) == self._family.image_token_id)
        ends = np.cumsum([layout.positions for layout in layouts])
        if len(places) != ends[-1]:
            raise BadRequest("the messages hold parts of what stands for images; leave them out", param="messages")
        if places[-1] == len(ids) - 1:
            raise BadRequest("an image is the very last of the prompt; the model answers to text", param="messages")
        own = np.split(places, ends[:-1])
        return [
            PlacedImage(picture, self.digest(picture), layout, positions)
            for picture, layout, positions in zip(pictures, layouts, own, strict=True)
        ]

    def digest(self, picture: Picture) -> bytes:
        """32 bytes that name a picture as this model sees it: its pixels, and what is done to them."""
        return hashlib.sha256(b"omlx picture 1" + picture.pixel_digest + self._family.settings_digest).digest()
