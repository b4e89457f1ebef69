"""How a model marks what its answer is made of: where it thinks, where it calls tools, and how calls are written."""

import json
import logging
import re
import secrets
import string
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from omlx.api.call_formats import GENERIC_CALLS, GENERIC_WRITTEN, CallFormat, Written, recognized
from omlx.api.call_syntax import CallSyntax
from omlx.api.events import ToolCall
from omlx.api.marks import NO_MARKS, Marks, added_tokens, is_token
from omlx.model.template_habits import PROBE_ARGUMENTS, PROBE_NAME, habits_of

logger = logging.getLogger(__name__)

State = Literal["content", "reasoning", "call", "header"]

# What surrounds reasoning, in the order in which they are looked for: in a template, and among the added tokens.
_THOUGHTS = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("<thought>", "</thought>"),
    ("<|channel>thought", "<channel|>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("Here is my thought process:", "Here is my response:"),
)
# What surrounds the text of an answer and is no part of it, if the template or the added tokens have the pair.
_WRAPPERS = (
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|START_TEXT|>", "<|END_TEXT|>"),
    ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    ("<response>", "</response>"),
    ("<answer>", "</answer>"),
)
_NAME = re.compile(r"[\w.:/-]{1,128}")
_ONE_BRACKET = re.compile(r"\s*[}\]]?\s*")
_MISTRAL = "[TOOL_CALLS]"


class Headers(NamedTuple):
    """Messages that begin with a header: `end` ends it, `begins` end the message before it.

    `state_of` takes a header and tells what its message is. `opening` begins a message that is the answer's text,
    `thought` is what surrounds a thought that comes before it.
    """

    end: str
    begins: tuple[str, ...]
    state_of: Callable[[str], State]
    opening: str
    thought: tuple[str, str]


def _harmony(header: str) -> State:
    if re.search(r"\bto=functions\.", header):
        return "call"
    return "reasoning" if "analysis" in header else "content"


def _muse(header: str) -> State:
    return "reasoning" if "to=self" in header else "content"


_HEADERS = {
    "harmony": Headers(
        "<|message|>",
        ("<|end|>", "<|start|>", "<|channel|>", "<|return|>", "<|call|>"),
        _harmony,
        "<|channel|>final<|message|>",
        ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    ),
    "muse_spark": Headers(
        "<|message|>", ("<|eom|>", "<|eot|>"), _muse, " to=user<|message|>", (" to=self<|message|>", "<|eom|>")
    ),
}


class Edge(NamedTuple):
    """A mark, as marked text has it, that ends a state and begins another one; "body" is what the header tells.

    `calls`: the syntax of the calls that it begins. `first`: it counts only where no text came before it.
    """

    marker: str
    to: Literal["content", "reasoning", "call", "header", "body"]
    calls: CallSyntax | None = None
    first: bool = False

    @property
    def quotable(self) -> bool:
        """Whether the same text may be a quotation: a token of its own is none."""
        return not is_token(self.marker)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What an answer may hold and how it is marked. `start`: the state in which the answer begins.

    `calls` are the ways to write calls, the model's own one first; there are none if no tool may be called. `enforced`:
    calls are held to their syntax while they are sampled, so they may be handed on before they are complete.
    `one_call`: the answer ends with its first call. `thought`: what surrounds reasoning; `opening`: what begins the
    answer's text. `written`: how enforced calls are written, None if the model's own way cannot be enforced.
    """

    edges: dict[State, tuple[Edge, ...]] = field(default_factory=dict)
    start: State = "content"
    calls: tuple[CallSyntax, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    enforced: bool = False
    one_call: bool = False
    marks: Marks = NO_MARKS
    headers: Headers | None = None
    thought: tuple[str, str] | None = None
    opening: str = ""
    written: Written | None = None

    @property
    def plain(self) -> bool:
        """Nothing but text."""
        return not self.edges

    def with_calls(self, calls: CallSyntax) -> "AnswerFormat":
        """The same with one other way to write calls, which has an end mark."""
        begin = Edge(self.marks.write(calls.start), "call", calls)
        edges: dict[State, tuple[Edge, ...]] = {"content": (begin,)}
        for source, targets in self.edges.items():
            edges[source] = (*(edge for edge in targets if edge.to != "call"), begin)
        return replace(self, edges=edges, calls=(calls,), written=GENERIC_WRITTEN)


PLAIN = AnswerFormat()


def answer_format(
    tokenizer: Any,
    prompt_end: str,
    tools: Sequence[dict[str, Any]] = (),
    *,
    enforced: bool = False,
    one_call: bool = False,
) -> AnswerFormat:
    """The format of an answer after a chat prompt that ends with `prompt_end`. With no `tools` none can be called.

    `tokenizer` is mlx-lm's TokenizerWrapper. The format is recognized by its template's text and its added tokens.
    """
    template, added = _template(tokenizer), added_tokens(tokenizer)
    known = _known_calls(tokenizer)
    headers = _HEADERS.get(known.name) if known else None
    thought = headers.thought if headers else _pair(_THOUGHTS, template, added)
    wrapper = _pair(_WRAPPERS, template, added)
    calls = _syntaxes(tokenizer, known) if tools else ()
    used = [mark for syntax in (*calls, GENERIC_CALLS) for mark in syntax.marks]
    used += [*(thought or ()), *(wrapper or ()), *((headers.end, *headers.begins) if headers else ())]
    builder = _Edges(Marks.of(tokenizer, used))
    if headers:
        builder.headers(headers)
    elif thought:
        builder.thought(*thought)
    if wrapper:
        builder.dropped(wrapper)
    builder.calls(calls)
    return AnswerFormat(
        builder.edges(),
        _start(headers, thought, prompt_end),
        calls,
        tuple(tools),
        enforced,
        one_call,
        builder.marks,
        headers,
        thought,
        headers.opening if headers else "",
        _written(tokenizer, known) if tools else None,
    )


def _written(tokenizer: Any, known: CallFormat | None) -> Written | None:
    """The way that the template writes a call, else the first that it shows a sign of.

    A model that gets the generic format explained is held to that one.
    """
    if known is None or not has_tool_template(tokenizer):
        return GENERIC_WRITTEN
    shown = habits_of(tokenizer, tools=True).shown_call
    for way in known.written:
        head = way.head.replace("NAME", PROBE_NAME).replace("NUMBER", "0")
        inside = PROBE_ARGUMENTS
        if way.member:
            before, after = way.member
            members = json.loads(PROBE_ARGUMENTS).items()
            inside = "".join(before.replace("KEY", key) + value + after for key, value in members)
        if f"{way.begin}{head}{inside}{way.tail}" in shown:
            return way
    template, added = _template(tokenizer), added_tokens(tokenizer)
    return next((way for way in known.written if all(s in template or s in added for s in way.signs)), None)


def _start(headers: Headers | None, thought: tuple[str, str] | None, prompt_end: str) -> State:
    if headers:
        return "header"
    return "reasoning" if thought and prompt_end.rstrip().endswith(thought[0]) else "content"


def call_syntax(tokenizer: Any) -> CallSyntax:
    """The model's own way to write calls, if its template shows one, or the generic one."""
    return _syntaxes(tokenizer, _known_calls(tokenizer))[0]


def _syntaxes(tokenizer: Any, known: CallFormat | None) -> tuple[CallSyntax, ...]:
    """A model that gets the generic format explained may still use its own."""
    own = known.calls if known else ()
    if has_tool_template(tokenizer):
        return own
    return (GENERIC_CALLS, *(calls for calls in own if calls.start != GENERIC_CALLS.start))


def has_tool_template(tokenizer: Any) -> bool:
    """Whether the model's template renders tools, in a form whose calls can be read."""
    return _known_calls(tokenizer) is not None and habits_of(tokenizer, tools=True).tools


def _known_calls(tokenizer: Any) -> CallFormat | None:
    parser = getattr(tokenizer, "tool_parser", None)
    name = parser.__module__.rpartition(".")[2] if parser is not None else None
    return recognized(_template(tokenizer), added_tokens(tokenizer), name)


def _template(tokenizer: Any) -> str:
    """The text of the chat template, of all of them if there are several; "" where it is a program."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        return "\n".join(str(text) for text in template.values())
    return template if isinstance(template, str) else ""


def _pair(pairs: Iterable[tuple[str, str]], template: str, added: dict[str, int]) -> tuple[str, str] | None:
    """The pair of marks that the tokenizer has as tokens, or else the template as text."""
    found = [pair for pair in pairs if all(_made_of(mark, added) for mark in pair)]
    found += [pair for pair in pairs if all(mark in template for mark in pair)]
    return found[0] if found else None


_TOKEN = re.compile(r"<\|?[^<>]*\|?>|\[[^\[\]]*\]")


def _made_of(mark: str, added: dict[str, int]) -> bool:
    """Whether every token that a mark is written with is an added one."""
    tokens = _TOKEN.findall(mark)
    return bool(tokens) and all(token in added for token in tokens)


class _Edges:
    """Collects the edges of a format."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self._edges: dict[State, list[Edge]] = {"content": []}

    def edges(self) -> dict[State, tuple[Edge, ...]]:
        return {source: tuple(targets) for source, targets in self._edges.items() if targets}

    def thought(self, begin: str, end: str) -> None:
        begin = self.marks.write(begin)
        # Where the marks are plain text, only an answer's beginning is a thought: the rest may speak of the mark.
        self._edges["content"].append(Edge(begin, "reasoning", first=not is_token(begin)))
        self._edges["reasoning"] = [Edge(self.marks.write(end), "content")]

    def headers(self, headers: Headers) -> None:
        self._edges["header"] = [Edge(self.marks.write(headers.end), "body")]
        for begin in headers.begins:
            for source in ("content", "reasoning"):
                self._edges.setdefault(source, []).append(Edge(self.marks.write(begin), "header"))

    def dropped(self, wrapper: tuple[str, str]) -> None:
        for mark in wrapper:
            self._edges["content"].append(Edge(self.marks.write(mark), "content"))

    def calls(self, syntaxes: Sequence[CallSyntax]) -> None:
        for syntax in syntaxes:
            if syntax.start:
                edge = Edge(self.marks.write(syntax.start), "call", syntax, first=syntax.bare)
                for source in ("content",) if syntax.bare or syntax.alone else tuple(self._edges):
                    self._edges[source].append(edge)


class ReadCalls(NamedTuple):
    """The calls in a text, and how many of its characters come after them."""

    calls: list[ToolCall]
    rest: int


def read_calls(text: str, syntax: CallSyntax, form: AnswerFormat) -> ReadCalls:
    """The calls in `text`, the inside of the call marks as marked text. Raises ValueError with a reason."""
    found = syntax.read(text, form.marks, form.tools)
    rest = len(text) - found.end
    if syntax.ends and _ONE_BRACKET.fullmatch(text, found.end):
        rest = 0
    if syntax.ends and rest:
        raise ValueError("more than calls in it")
    calls = [_call(item, syntax, form) for item in found.calls]
    if not calls or None in calls:
        raise ValueError("no name and arguments in it")
    return ReadCalls([call for call in calls if call is not None], rest)


def warn_unreadable(reason: str) -> None:
    logger.warning("could not read a tool call, delivering it as text (%s)", reason[:200])


def _call(item: dict[str, Any], syntax: CallSyntax, form: AnswerFormat) -> ToolCall | None:
    """A call from what a syntax gave; None if it is none."""
    name, arguments = item.get("name"), item.get("arguments")
    if isinstance(arguments, str):
        arguments = _loaded(arguments)
    if not (isinstance(name, str) and _NAME.fullmatch(name) and isinstance(arguments, dict)):
        return None
    # Where marks say that it is a call, a tool that nobody declared is the client's to refuse: the model can be told.
    if syntax.declared and name not in tool_names(form.tools):
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
        return json.loads(text or "{}", strict=False)
    except (ValueError, RecursionError):
        return None


def _call_id(item: dict[str, Any], form: AnswerFormat) -> str:
    """The model's own id if it gave one: its template may want to see it again."""
    given = item.get("id")
    return given if isinstance(given, str) and 0 < len(given) <= 200 else new_call_id(form)


def new_call_id(form: AnswerFormat) -> str:
    """Mistral's templates take ids of nine letters and digits only."""
    if form.calls and form.calls[0].start == _MISTRAL:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{uuid.uuid4().hex[:24]}"
