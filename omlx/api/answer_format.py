"""How a model marks what its answer is made of: where it thinks, where it calls tools, and how calls are written."""

import json
import logging
import re
import secrets
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from omlx.api.events import ToolCall

logger = logging.getLogger(__name__)

State = Literal["content", "reasoning", "call", "header"]
# As mlx-lm calls them.
_STATES: dict[str, State] = {"normal": "content", "reasoning": "reasoning", "tool": "call", "header": "header"}

_THINK = ("<think>", "</think>")
_NAME = re.compile(r"[\w.:/-]{1,128}")
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_ARGUMENTS = re.compile(r"[\w-]+\s*\[ARGS\]\s*")


class Edge(NamedTuple):
    """A text that ends a state and begins another one."""

    marker: str
    to: State


class CallSyntax(NamedTuple):
    """How a call is written: between `start` and `end` ("" if only the end of the answer ends it).

    `parse` takes what is between them and the tools (as OpenAI describes them); gives a call or a list of calls, dicts
    with `name` and `arguments`; raises anything. `plain_json`: it is an object with these two and nothing else.
    """

    start: str
    end: str
    parse: Callable[[str, Any], Any]
    plain_json: bool = False


def _parse_json(text: str, tools: Any) -> Any:
    return json.loads(text)


# For models whose template knows no tools: they are told of this one.
GENERIC_CALLS = CallSyntax("<tool_call>", "</tool_call>", _parse_json, plain_json=True)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What an answer may hold and how it is marked. `start`: the state in which the answer begins.

    `calls` is None if no tool may be called. `enforced`: calls are held to their syntax while they are sampled, so
    they may be handed on before they are complete. `one_call`: the answer ends with its first call.
    """

    edges: dict[State, tuple[Edge, ...]] = field(default_factory=dict)
    start: State = "content"
    calls: CallSyntax | None = None
    tools: tuple[dict[str, Any], ...] = ()
    enforced: bool = False
    one_call: bool = False

    @property
    def plain(self) -> bool:
        """Nothing but text."""
        return not self.edges

    def with_calls(self, calls: CallSyntax) -> "AnswerFormat":
        """The same with another way to write calls, which has an end mark."""
        edges: dict[State, tuple[Edge, ...]] = {
            source: tuple(Edge(calls.start, "call") if edge.to == "call" else edge for edge in targets)
            for source, targets in self.edges.items()
        }
        return replace(self, edges=edges | {"call": (Edge(calls.end, "content"),)}, calls=calls)


PLAIN = AnswerFormat()


def answer_format(
    tokenizer: Any,
    prompt_end: str,
    tools: Sequence[dict[str, Any]] = (),
    *,
    enforced: bool = False,
    one_call: bool = False,
) -> AnswerFormat:
    """The format of an answer behind a chat prompt that ends with `prompt_end`. With no `tools` none can be called.

    `tokenizer` is mlx-lm's TokenizerWrapper, which knows the model's markers.
    """
    calls = call_syntax(tokenizer) if tools else None
    edges = _edges(tokenizer, calls)
    think = _think_markers(tokenizer)
    start: State = _STATES[getattr(tokenizer, "response_initial_state", None) or "normal"]
    if think is not None and prompt_end.rstrip().endswith(think[0]):
        start = "reasoning"
    return AnswerFormat(edges, start, calls, tuple(tools), enforced, one_call)


def call_syntax(tokenizer: Any) -> CallSyntax:
    """The model's own way to write calls, as its template shows it, or the generic one."""
    if not has_tool_template(tokenizer):
        return GENERIC_CALLS
    plain = tokenizer.tool_parser.__module__.endswith(".json_tools")
    return CallSyntax(tokenizer.tool_call_start, tokenizer.tool_call_end, tokenizer.tool_parser, plain)


def has_tool_template(tokenizer: Any) -> bool:
    """Whether the model's template renders tools, in a form whose calls can be read."""
    return bool(getattr(tokenizer, "has_tool_calling", False))


def _think_markers(tokenizer: Any) -> tuple[str, str] | None:
    if getattr(tokenizer, "has_thinking", False):
        return tokenizer.think_start, tokenizer.think_end
    template = getattr(tokenizer, "chat_template", None)
    written = isinstance(template, str) and all(marker in template for marker in _THINK)
    return _THINK if written else None


def _edges(tokenizer: Any, calls: CallSyntax | None) -> dict[State, tuple[Edge, ...]]:
    own = getattr(tokenizer, "response_transitions", None) or {}
    edges: dict[State, list[Edge]] = {}
    for source, targets in own.items():
        edges[_STATES[source]] = [Edge(marker, _STATES[to]) for marker, to in targets]
    content = edges.setdefault("content", [])
    content += [Edge(marker, "content") for marker in getattr(tokenizer, "structural_markers", None) or ()]
    if think := _think_markers(tokenizer):
        content.append(Edge(think[0], "reasoning"))
        edges.setdefault("reasoning", []).append(Edge(think[1], "content"))
    if calls is not None:
        _add_calls(edges, calls, decided=any(to == "tool" for targets in own.values() for _, to in targets))
    else:
        edges = {source: [edge for edge in targets if edge.to != "call"] for source, targets in edges.items()}
    return {source: tuple(targets) for source, targets in edges.items() if targets}


def _add_calls(edges: dict[State, list[Edge]], calls: CallSyntax, *, decided: bool) -> None:
    """`decided`: the model's format says by itself where calls begin."""
    begin = Edge(calls.start, "call")
    if not decided:
        edges["content"].append(begin)
    if "reasoning" in edges:
        edges["reasoning"].append(begin)
    if calls.end:
        edges["call"] = [Edge(calls.end, "content")]


class ReadCalls(NamedTuple):
    """The calls in a text, and what is left of it behind them."""

    calls: list[ToolCall]
    rest: str


def read_calls(text: str, form: AnswerFormat) -> ReadCalls | None:
    """The calls that `text`, the inside of the call markers, stands for; None, with a warning, if it cannot be read."""
    assert form.calls is not None
    text, rest = _split_open_end(text) if not form.calls.end else (text, "")
    try:
        parsed = form.calls.parse(text, list(form.tools))
    # The parsers are mlx-lm's, one for each family, and answer what a model garbled with all kinds of errors.
    except Exception as error:
        _warn(f"{type(error).__name__}: {error}")
        return None
    found = parsed if isinstance(parsed, list) else [parsed]
    calls = [_call(item, form) for item in found]
    if not calls or None in calls:
        _warn("no name and arguments in it")
        return None
    return ReadCalls([call for call in calls if call is not None], rest)


def _warn(reason: str) -> None:
    logger.warning("a tool call could not be read and is delivered as text (%s)", reason[:200])


def _call(item: Any, form: AnswerFormat) -> ToolCall | None:
    """A call from what a parser gave; None if it is none."""
    if not isinstance(item, dict):
        return None
    name, arguments = item.get("name"), item.get("arguments", item.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _loaded(arguments)
    if not (isinstance(name, str) and _NAME.fullmatch(name) and isinstance(arguments, dict)):
        return None
    # Some parsers take any text for a call of this shape. A tool that nobody declared is the client's to refuse: the
    # model can then be told.
    if list(arguments) == ["raw"] and name not in tool_names(form.tools):
        return None
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        written.encode()
    # A Python literal that JSON does not have, half of a surrogate pair, or too deep.
    except (TypeError, ValueError, RecursionError):
        return None
    return ToolCall(_call_id(item, form), name, written)


def tool_names(tools: Sequence[dict[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def _loaded(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None


def _call_id(item: dict[str, Any], form: AnswerFormat) -> str:
    """The model's own id if it gave one: its template may want to see it again."""
    given = item.get("id")
    return given if isinstance(given, str) and 0 < len(given) <= 200 else new_call_id(form)


def new_call_id(form: AnswerFormat) -> str:
    """Mistral's templates take ids of nine letters and digits only."""
    if form.calls is not None and form.calls.start == _MISTRAL:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{uuid.uuid4().hex[:24]}"


def _split_open_end(text: str) -> tuple[str, str]:
    """Calls that no marker ends (Mistral's), and what follows them: mlx-lm's parser would pass over it."""
    decoder = json.JSONDecoder()
    at = len(text) - len(text.lstrip())
    headers = list(_MISTRAL_ARGUMENTS.finditer(text))
    try:
        if not headers:
            _, end = decoder.raw_decode(text, at)
            return text[:end], text[end:]
        end = 0
        for header in headers:
            if header.start() >= end:  # else it stands inside the arguments before
                _, end = decoder.raw_decode(text, header.end())
    except (ValueError, RecursionError):
        return text, ""
    return text[:end], text[end:]
