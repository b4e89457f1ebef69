"""From a body of POST /v1/responses to the request, and what is kept of it."""

import logging
from dataclasses import dataclass, replace
from typing import Any

from omlx.api.chat import ChatPrompt, ChatRequest, OutputFormat, ToolChoice, unset_fields
from omlx.api.openai import sampling_of
from omlx.api.openai_body import MAX_MESSAGES
from omlx.api.openai_tools import format_of, template_args
from omlx.api.responses.body import (
    ITEM,
    LOGPROBS,
    CompactBody,
    Item,
    LeftOutTool,
    MessageItem,
    ReferenceItem,
    ResponsesBody,
    validated_body,
)
from omlx.api.responses.compaction import MOST_TOKENS, QUESTION, CompactDialect
from omlx.api.responses.conversation import Conversation
from omlx.api.responses.dialect import ResponsesDialect
from omlx.api.responses.output import new_id
from omlx.api.responses.store import ResponseStore
from omlx.api.responses.tools import Tools, tools_of
from omlx.errors import BadRequest, NotFound

logger = logging.getLogger("omlx.responses")

Json = dict[str, Any]
_ITEM_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def parse(body: Json, store: ResponseStore, owner: bytes) -> tuple[ChatRequest, ResponsesDialect]:
    """The request, and how its answer is told; then it is kept in `store`. Raises BadRequest, which names the field."""
    fields = validated_body(body)
    tools = tools_of(fields)
    _warn_of_left_out(fields)
    given = _given(fields, body, store, owner)
    prompt = _prompt(fields, given, tools, store, owner)
    top_logprobs = _top_logprobs(fields)
    request = ChatRequest(
        model=fields.model,
        prompt=prompt,
        sampling=sampling_of(fields, fields.max_output_tokens or 0, top_logprobs),
        stream=bool(fields.stream),
        use_cache=fields.cache is not False,
        cache_salt=fields.cache_salt or "",
        prompt_field="input",
        tool_choice=tools.choice,
        output_format=_format(fields),
        format_field="text.format",
        unset=unset_fields(fields),
    )
    items = [_kept(one) for one in given]

    def keep(response: Json) -> None:
        if fields.store is not False:
            store.keep(owner, response, items)

    return request, ResponsesDialect(_echo(fields, body), tools, top_logprobs is not None, request.use_cache, keep)


def parse_input_tokens(body: Json, store: ResponseStore, owner: bytes) -> ChatRequest:
    """The request whose prompt is counted. Raises BadRequest, which names the field."""
    whole = body if body.get("input") is not None else body | {"input": []}
    return parse(whole, store, owner)[0]


def parse_compact(body: Json, store: ResponseStore, owner: bytes) -> tuple[ChatRequest, CompactDialect]:
    """The request for a summary of a conversation. Its prompt begins as that of the conversation's next turn does.

    Raises BadRequest, which names the field.
    """
    whole = body if body.get("input") is not None else body | {"input": []}
    whole = {name: value for name, value in whole.items() if name in CompactBody.model_fields}
    fields = validated_body(whole | {"stream": False, "max_output_tokens": MOST_TOKENS, "text": None})
    tools = tools_of(fields)
    given = _given(fields, whole, store, owner)
    earlier = [] if fields.previous_response_id is None else store.conversation(owner, fields.previous_response_id)
    prompt = _prompt(fields, given, tools, store, owner)
    question = {"role": "user", "content": QUESTION}
    request = ChatRequest(
        model=fields.model,
        prompt=replace(prompt, messages=[*prompt.messages, question]),
        sampling=sampling_of(fields, MOST_TOKENS, None),
        use_cache=fields.cache is not False,
        cache_salt=fields.cache_salt or "",
        prompt_field="input",
        tool_choice=ToolChoice("none"),
        unset=unset_fields(fields),
    )
    items = [*earlier, *(_kept(one) for one in given)]
    said = [item for item in items if item.get("type", "message") == "message" and item.get("role") == "user"]
    return request, CompactDialect(said, writes_cache=request.use_cache)


def _warn_of_left_out(fields: ResponsesBody) -> None:
    if hosted := {str(tool.type) for tool in fields.tools or () if isinstance(tool, LeftOutTool)}:
        logger.warning("the model is not told of hosted tools, which are not here: %s", ", ".join(sorted(hosted)))


@dataclass(frozen=True, slots=True)
class _Given:
    """One item of the input: as it came, and as it was read."""

    raw: Json
    item: Item
    place: str


def _given(fields: ResponsesBody, body: Json, store: ResponseStore, owner: bytes) -> list[_Given]:
    """The items of the input; a text is a message of the user, and stored items are put where they are referred to."""
    if isinstance(fields.input, str):
        return [_Given({"role": "user"}, MessageItem(role="user", content=fields.input), "input")]
    pairs = enumerate(zip(body["input"], fields.input, strict=True))
    given = [_Given(raw, item, f"input[{at}]") for at, (raw, item) in pairs]
    stored = store.items(owner, _references(given))
    return [_looked_up(one, stored) for one in given]


def _references(given: list[_Given]) -> list[str]:
    """The ids of the items that are referred to. Raises BadRequest for one that is there twice, as OpenAI does.

    A short body could otherwise stand for any number of large items.
    """
    names: dict[str, None] = {}
    for one in given:
        if isinstance(one.item, ReferenceItem):
            if one.item.id in names:
                place = f"{one.place}.id"
                raise BadRequest(f"{place}: Duplicate item found with id {one.item.id!r}.", param=place)
            names[one.item.id] = None
    return list(names)


def _looked_up(given: _Given, stored: dict[str, Json]) -> _Given:
    if not isinstance(given.item, ReferenceItem):
        return given
    name, place = given.item.id, f"{given.place}.id"
    raw = stored.get(name)
    if raw is None:
        raise NotFound(f"{place}: Item with id {name!r} not found.", param=place, code=None)
    return _Given(raw, ITEM.validate_python(raw), given.place)


def _prompt(fields: ResponsesBody, given: list[_Given], tools: Tools, store: ResponseStore, owner: bytes) -> ChatPrompt:
    conversation = Conversation()
    if fields.previous_response_id is not None:
        earlier = store.conversation(owner, fields.previous_response_id)
        if len(earlier) + len(given) > MAX_MESSAGES:
            message = f"input: with those of the turns before it, it has more than {MAX_MESSAGES} items"
            raise BadRequest(message, param="input")
        conversation.add((ITEM.validate_python(raw), "previous_response_id") for raw in earlier)
    conversation.add((one.item, one.place) for one in given)
    messages = conversation.messages(fields.instructions)
    if not messages:
        raise BadRequest("input: there is no message in it", param="input")
    effort = fields.reasoning.effort if fields.reasoning is not None else None
    args = template_args(effort, fields.chat_template_kwargs)
    return ChatPrompt(messages, args, tools.canonical, tuple(conversation.images))


def _top_logprobs(fields: ResponsesBody) -> int | None:
    wanted = bool(fields.top_logprobs) or LOGPROBS in (fields.include or ())
    return (fields.top_logprobs or 0) if wanted else None


def _format(fields: ResponsesBody) -> OutputFormat | None:
    given = fields.text.format if fields.text is not None else None
    return None if given is None else format_of(given.type, given, "text.format.schema")


def _kept(given: _Given) -> Json:
    """An item as it is kept and listed: with an id, and with content in parts."""
    raw, item = given.raw, given.item
    kind = item.type or "message"
    name = raw.get("id")
    prefix = _ITEM_PREFIXES.get(kind, "item")
    head: Json = {"id": name if isinstance(name, str) and 0 < len(name) <= 200 else new_id(prefix)}
    head |= {"type": kind, "status": "completed"}
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        part: Json = {"type": "input_text", "text": item.content}
        if item.role == "assistant":
            part = {"type": "output_text", "text": item.content, "annotations": []}
        head["content"] = [part]
    return raw | head


def _echo(fields: ResponsesBody, body: Json) -> Json:
    """What a response says of its request: as it was understood, not only as it was sent."""
    effort = fields.reasoning.effort if fields.reasoning is not None else None
    form = fields.text.format if fields.text is not None else None
    told = [tool for tool in fields.tools or () if not isinstance(tool, LeftOutTool)]
    return {
        "model": fields.model,
        "instructions": fields.instructions,
        "previous_response_id": fields.previous_response_id,
        "max_output_tokens": fields.max_output_tokens,
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "top_p": 1.0 if fields.top_p is None else fields.top_p,
        "top_logprobs": fields.top_logprobs or 0,
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [tool.model_dump(exclude_none=True) for tool in told],
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
        "reasoning": {"effort": effort, "summary": None},
        "store": fields.store is not False,
        "metadata": fields.metadata or {},
        "truncation": "disabled",
        "background": False,
        "service_tier": "default",
    }
