"""From the items of an input to the messages of a conversation."""

from collections.abc import Iterable
from typing import Any

from omlx.api.chat import ImagePart
from omlx.api.custom_tools import custom_arguments
from omlx.api.openai_content import PartKinds, content_of, text_of
from omlx.api.openai_tools import past_call, with_names
from omlx.api.responses.body import (
    CallItem,
    CallOutputItem,
    CustomCallItem,
    Item,
    MessageItem,
    OtherItem,
    ReasoningItem,
)
from omlx.api.responses.compaction import message_of
from omlx.api.responses.tools import name_in_prompt
from omlx.api.tool_content import brought_line, result_content

PARTS = PartKinds(
    {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"},
    "input_image",
    ("input_audio", "input_file"),
)
# In the order in which an answer of one message has them.
_REASONING, _TEXT, _CALLS = range(3)


class Conversation:
    """Messages for the chat template, from items. What the model said in one turn becomes one message again.

    A new one begins where the items come in another order than templates write them in: then the prompt is what was
    generated at least up to there.
    """

    def __init__(self) -> None:
        self.images: list[ImagePart] = []
        self._messages: list[dict[str, Any]] = []
        self._stage: int | None = None  # of the last message, if it is an answer that may go on

    def messages(self, instructions: str | None = None) -> list[dict[str, Any]]:
        """All of them, behind the instructions.

        System messages that follow those directly are joined to them: many templates take but one.
        """
        messages = with_names(self._messages)
        if instructions is None:
            return messages
        count = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
        texts = [instructions, *(message["content"] for message in messages[:count])]
        return [{"role": "system", "content": "\n\n".join(texts)}, *messages[count:]]

    def add(self, items: Iterable[tuple[Item, str]]) -> None:
        """Items, each with its place in the body for messages. Raises BadRequest, which names the wrong part."""
        for item, place in items:
            self._add(item, place)

    def _add(self, item: Item, place: str) -> None:
        match item:
            case MessageItem(role="assistant"):
                self._answer(_TEXT)["content"] = text_of(item.content or "", f"{place}.content", PARTS)
            case MessageItem():
                self._append(self._said(item, f"{place}.content"))
            case ReasoningItem():
                self._add_reasoning("".join(part.text for part in item.content or ()))
            case CallItem():
                self._call(item, item.arguments)
            case CustomCallItem():
                self._call(item, custom_arguments(item.input))
            case CallOutputItem():
                content = result_content(item.output, f"{place}.output", self.images)
                self._append({"role": "tool", "content": content, "tool_call_id": item.call_id})
            case OtherItem():
                self._brought(item, place)
            case _:
                raise AssertionError("references are looked up before")

    def _brought(self, item: OtherItem, place: str) -> None:
        """What a client ran for another server is a call and its result, the rest a line of the answer, or nothing."""
        given = {"type": item.type, **(item.model_extra or {})}
        call_id, output = given.get("call_id") or given.get("id"), given.get("output")
        named = isinstance(call_id, str) and 0 < len(call_id) <= 200
        if item.type.endswith("_call_output"):
            content = result_content(output if isinstance(output, str | list) else [output], place, self.images)
            self._append({"role": "tool", "content": content} | ({"tool_call_id": call_id} if named else {}))
        elif named and ("call_id" in given or item.type == "mcp_call"):
            members = [given[name] for name in ("action", "operation", "arguments", "input") if given.get(name)]
            arguments = members[0] if members and isinstance(members[0], str | dict) else {}
            name = given["name"] if isinstance(given.get("name"), str) else item.type.removesuffix("_call")
            self._answer(_CALLS).setdefault("tool_calls", []).append(past_call(call_id, name[:200], arguments))
            if item.type == "mcp_call" and isinstance(output, str):
                self._append({"role": "tool", "content": output, "tool_call_id": call_id})
        elif item.type == "compaction" and (summary := message_of(given.get("encrypted_content"))) is not None:
            self._append({"role": "user", "content": summary})
        elif text := brought_line(given):
            self._answer(_TEXT)["content"] = text

    def _said(self, item: MessageItem, place: str) -> dict[str, Any]:
        if item.role == "user":
            return {"role": "user", "content": content_of(item.content, place, self.images, PARTS)}
        return {"role": "system", "content": text_of(item.content, place, PARTS)}

    def _append(self, message: dict[str, Any]) -> None:
        self._messages.append(message)
        self._stage = None

    def _answer(self, stage: int) -> dict[str, Any]:
        """The model's message that goes on with a part of this stage. There is one text in each."""
        if self._stage is None or stage < self._stage or stage == self._stage == _TEXT:
            self._append({"role": "assistant", "content": ""})
        self._stage = stage
        return self._messages[-1]

    def _add_reasoning(self, text: str) -> None:
        if text:
            message = self._answer(_REASONING)
            message["reasoning_content"] = message.get("reasoning_content", "") + text

    def _call(self, item: CallItem | CustomCallItem, arguments: str) -> None:
        call = past_call(item.call_id, name_in_prompt(item.name, item.namespace), arguments)
        self._answer(_CALLS).setdefault("tool_calls", []).append(call)
