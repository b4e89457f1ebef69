"""POST /v1/responses/compact: a conversation as the messages of the user and a summary that the model writes.

The summary is in an item that clients hand back with later requests. OpenAI's are encrypted; this one is only encoded,
since it holds nothing that the client did not send or could not ask for.
"""

import base64
import binascii
import json
import time
from typing import Any

from omlx.api.events import Answer, Event
from omlx.api.responses.dialect import usage_body
from omlx.api.responses.output import new_id

Json = dict[str, Any]

MOST_TOKENS = 4096
"""Of a summary."""

QUESTION = (
    "Summarize the conversation so far for someone who has to go on with it and sees nothing else of it: what was "
    "asked for, what was done and found, names, paths and values that are needed again, and what is left to do. Write "
    "the summary only."
)
_BEFORE = "[Summary of the conversation so far]\n"
_MARK = "omlx-1:"
_LARGEST = 1 << 20  # characters of an item's content


def sealed(summary: str) -> str:
    """The content of an item that holds a summary."""
    return _MARK + base64.b64encode(json.dumps({"summary": summary}).encode()).decode()


def message_of(content: Any) -> str | None:
    """What the model is told of an item's content; None for what another server made."""
    if not isinstance(content, str) or not content.startswith(_MARK) or len(content) > _LARGEST:
        return None
    try:
        summary = json.loads(base64.b64decode(content.removeprefix(_MARK), validate=True))["summary"]
    except (binascii.Error, ValueError, LookupError, TypeError, RecursionError):
        return None
    return _BEFORE + summary if isinstance(summary, str) else None


class CompactDialect:
    """Tells of a summary as a compacted conversation: `said` are the items of what the user said."""

    def __init__(self, said: list[Json], *, writes_cache: bool) -> None:
        self.request_id = new_id("resp")
        self._created = int(time.time())
        self._said = said
        self._writes_cache = writes_cache

    def frames(self, event: Event) -> list[str]:
        raise AssertionError("summaries are not streamed")

    def body(self, answer: Answer) -> Json:
        (choice,) = answer.choices
        item = {"id": new_id("cmp"), "type": "compaction", "encrypted_content": sealed(choice.text)}
        return {
            "id": self.request_id,
            "object": "response.compaction",
            "created_at": self._created,
            "output": [*self._said, item],
            "usage": usage_body(answer.usage, self._writes_cache),
        }
