"""What an answer has to look like, as a grammar that is enforced while it is sampled.

Grammars are Lark in llguidance's dialect: `%json` stands for JSON of a schema, `<[7]>` for the token 7. They are text
here; the engine compiles them.
"""

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from omlx.api.answer_format import AnswerFormat
from omlx.api.call_formats import GENERIC_CALLS, GENERIC_WRITTEN, Written
from omlx.api.chat import ChatRequest, OutputFormat, ToolChoice
from omlx.errors import BadRequest
from omlx.model import grammar as grammars
from omlx.model.json_schema import PROSE, arguments
from omlx.model.schema_trial import problems, relaxed
from omlx.request import GrammarSpec

log = logging.getLogger("omlx.server")

# More than this many calls in a row are a model that goes round in circles.
MOST_CALLS = 8

# As templates write JSON, so that a call is the same text when it comes back in a prompt.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_SPACE = r"SPACE: /[ \n]{0,4}/"
_TAG = re.compile(r"</?[\w:.]+(?:[=>]| name=)")
# What a schema may have if its arguments are written one by one.
_OBJECT_KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties"})
_MEMBER_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_TEXT = r"TEXT: /(.|\n)*/"


def constrained(asked: ChatRequest, form: AnswerFormat, tokenizer: Any) -> tuple[GrammarSpec | None, AnswerFormat]:
    """The grammar that an answer is held to, None if it is free; and the format that it then has.

    Calls are held to the model's own way to write them. A model whose way cannot be enforced is held to the generic one
    where it has to call. Raises BadRequest for a schema that cannot be enforced.
    """
    choice, output = asked.tool_choice, asked.output_format
    must_call = choice.mode in ("required", "named")
    may_call = bool(form.calls) and (must_call or output is not None or choice.strict or bool(choice.allowed))
    if not may_call:
        return _of_output(output, form, tokenizer), form
    called = _called(form.tools, choice)
    if form.written is None or not (must_call or _has_mark(form, form.written)) or not _writable(form.written, called):
        if not (must_call or output is not None):
            return None, form  # calls of this form cannot be held to schemas or names
        form = form.with_calls(GENERIC_CALLS)
    grammar = _Grammar(tokenizer, form)
    grammar.bodies(called, choice)
    if must_call:
        grammar.start(grammar.calls(choice))
    elif output is not None:
        grammar.start(f"({grammar.output(output)} | {grammar.calls(choice)})")
    else:
        grammar.start(grammar.text_and(choice))
    return GrammarSpec("lark", grammar.text()), replace(form, enforced=True)


def _called(tools: Sequence[dict[str, Any]], choice: ToolChoice) -> list[dict[str, Any]]:
    """The functions that may be called."""
    functions = [tool["function"] for tool in tools]
    allowed = (choice.name,) if choice.mode == "named" else choice.allowed
    return [function for function in functions if not allowed or function["name"] in allowed]


def _writable(written: Written, functions: Sequence[dict[str, Any]]) -> bool:
    """Whether arguments that fit the schemas can be written in this way, where they are no JSON: if all are simple."""
    return written.member is None or all(_has_simple_members(function["parameters"]) for function in functions)


def _has_simple_members(schema: Any) -> bool:
    if not isinstance(schema, dict) or not schema.keys() - PROSE <= _OBJECT_KEYWORDS or schema.get("type") != "object":
        return False
    properties = schema.get("properties", {})
    return set(schema.get("required", ())) <= properties.keys() and all(
        _MEMBER_NAME.fullmatch(key) and _is_simple(member) for key, member in properties.items()
    )


def _is_simple(schema: Any) -> bool:
    """Any text, texts of a list that hold no tag, or a number or the like."""
    if not isinstance(schema, dict):
        return False
    keys, kind = schema.keys() - PROSE, schema.get("type")
    if kind in ("integer", "number", "boolean"):
        return keys <= {"type", "minimum", "maximum"} and (kind != "number" or {"minimum", "maximum"} <= keys)
    texts = _texts(schema)
    simple = all(isinstance(text, str) and "<" not in text for text in texts) and schema.get("enum") != []
    return kind == "string" and keys <= {"type", "enum", "const"} and len(keys) <= 2 and simple


def _texts(schema: dict[str, Any]) -> list[Any]:
    """The only texts that fit the schema of a text; none if all do."""
    return [schema["const"]] if "const" in schema else list(schema.get("enum", ()))


def _has_mark(form: AnswerFormat, written: Written) -> bool:
    """Whether calls begin with a mark that tells them from other text."""
    syntax = form.calls[written.syntax]
    return bool(syntax.start) and not syntax.bare and (written.begin + written.head).startswith(syntax.start)


def _of_output(output: OutputFormat | None, form: AnswerFormat, tokenizer: Any) -> GrammarSpec | None:
    """The grammar of an answer that has nothing but the output format, perhaps after reasoning."""
    if output is None:
        return None
    if form.thought is None and output.kind == "grammar":
        return grammars.lark(output.text)
    if form.thought is not None or output.kind in ("choice", "regex", "grammar"):
        grammar = _Grammar(tokenizer, form)
        grammar.start(grammar.output(output))
        return GrammarSpec("lark", grammar.text())
    if output.kind == "json_object":
        return grammars.json_object()
    return grammars.json_schema(_schema(output), strict=output.strict)


def _rule(output: OutputFormat) -> str:
    """The output format as an expression of a Lark grammar. Raises BadRequest for one that cannot be enforced."""
    if output.kind == "choice":
        return " | ".join(map(_json, output.choices))
    if output.kind == "regex":
        return grammars.regex_rule(output.text)
    if output.kind == "grammar":
        return grammars.lark_rule(output.text)
    return grammars.json_rule(_schema(output), strict=output.strict)


def _schema(output: OutputFormat) -> dict[str, Any]:
    """As an object: true stands for any JSON. Raises BadRequest for false, which nothing fits."""
    if output.kind == "json_object":
        return {"type": "object"}
    if output.schema is False:
        raise BadRequest("nothing fits the schema false")
    return output.schema if isinstance(output.schema, dict) else {}


def without_problems(
    asked: ChatRequest, tools: Sequence[dict[str, Any]], refusal: str
) -> tuple[ChatRequest, tuple[dict[str, Any], ...]]:
    """The request and its tools with schemas that leave out what cannot be enforced, which is logged. Blocks.

    `refusal` is why the grammar was refused. Raises BadRequest for schemas that have to be enforced strictly, with the
    tool and the place, and with `refusal` if no keyword is to blame.
    """
    output, found = asked.output_format, False
    if output is not None and isinstance(output.schema, dict):
        schema = _relaxed(output.schema, asked.model, asked.format_field, strict=output.strict)
        found = schema is not output.schema
        asked = replace(asked, output_format=output._replace(schema=schema))
    changed = []
    for index, tool in enumerate(tools):
        function, place = tool["function"], f"tools[{index}] ({tool['function']['name']})"
        parameters = function.get("parameters")
        if isinstance(parameters, dict):
            parameters = _relaxed(parameters, asked.model, place, strict=asked.tool_choice.strict)
            found = found or parameters is not function["parameters"]
        changed.append({**tool, "function": {**function, "parameters": parameters}})
    if not found:
        raise BadRequest(refusal)
    return asked, tuple(changed)


def _relaxed(schema: dict[str, Any], model: str, place: str, *, strict: bool) -> dict[str, Any]:
    """The schema itself if all its keywords can be enforced. Raises BadRequest if `strict` and one cannot."""
    wrong = problems(schema)
    if not wrong:
        return schema
    if strict:
        raise BadRequest(f"{place}: {wrong[0]}")
    for problem in wrong:
        _log_once(f"{place}: not enforced (no strict): {problem}", model)
    return relaxed(schema, wrong)


@lru_cache(maxsize=1000)
def _log_once(text: str, model: str) -> None:
    log.warning("model %s: %s", model, text)


class _Grammar:
    """Collects the rules of one grammar."""

    def __init__(self, tokenizer: Any, form: AnswerFormat) -> None:
        self._tokenizer = tokenizer
        self._form = form
        self._written = form.written or GENERIC_WRITTEN
        self._rules = [_SPACE, _TEXT]
        self._start = ""
        self._functions: list[str] = []  # names of the tools that may be called
        self._named: set[str] = set()
        self._unforced = False  # holds a client's own patterns

    def text(self) -> str:
        written = "\n".join([self._start, *self._rules]) + "\n"
        return grammars.unforced(written) if self._unforced else written

    def start(self, answer: str) -> None:
        """`answer` is all there is, but for reasoning before it."""
        self._start = f"start: {self._reasoning()}{answer}"

    def opened(self, answer: str) -> str:
        """What begins the text of an answer, and `answer`."""
        return f"{self._marker(self._form.opening)} {answer}" if self._form.opening else answer

    def output(self, output: OutputFormat) -> str:
        self._rules.append(f"output: {_rule(output)}")
        self._unforced = self._unforced or output.kind in ("regex", "grammar")
        return self.opened("output")

    def calls(self, choice: ToolChoice, *, begun: str = "") -> str:
        """One call of those that may be called, or several; without `begun`, with which they begin."""
        written = self._written
        head, between = written.begin.removeprefix(begun), written.between
        if self._form.headers is None or self._form.headers.end not in written.head:
            head = self._form.opening + head
        bodies = self._heads("" if begun and written.begin else begun)
        parts = [self._marker(head), bodies[0]]
        if between is not None and choice.mode != "named" and choice.parallel:
            space = "SPACE" if between.isspace() and not written.begin else self._marker(between)
            more = self._heads("")
            if "NUMBER" in written.head:
                tail = ""
                for body in reversed(more[1:]):
                    tail = f"({space} {body} {tail})?"
                parts.append(tail)
            else:
                parts.append(f"({space} {more[0]}){{0,{MOST_CALLS - 1}}}")
        return " ".join(part for part in (*parts, self._end(written.end)) if part)

    def text_and(self, choice: ToolChoice) -> str:
        """Text, in which calls may stand."""
        start = self._form.calls[self._written.syntax].start
        one = choice._replace(parallel=choice.parallel and bool(self._written.begin))
        self._rules.append(f"inside: {self.calls(one, begun=start)}")
        begin = self._through(start, "begin")
        return f"({begin} inside)? TEXT" if not choice.parallel else f"({begin} inside)* TEXT"

    def _heads(self, begun: str) -> list[str]:
        """For each number that a call may have a rule of one call, without `begun`, with which it begins."""
        head = self._written.head.removeprefix(begun)
        numbers = range(MOST_CALLS if "NUMBER" in head else 1)
        names = [f"call_{'inside_' if begun else ''}{number}" for number in numbers]
        for number, name in zip(numbers, names, strict=True):
            if name in self._named:
                continue
            self._named.add(name)
            ways = []
            for index, function in enumerate(self._functions):
                before, _, behind = head.replace("NUMBER", str(number)).partition("NAME")
                name_written = json.dumps(function)[1:-1] if before.endswith('"') else function
                opening = [self._marker(before), _json(name_written), self._marker(behind)]
                ways.append(" ".join(part for part in (*opening, f"arguments_{index}", self._tail()) if part))
            self._rules.append(f"{name}: {' | '.join(ways)}")
        return names

    def _tail(self) -> str:
        return self._end(self._written.tail)

    def _end(self, text: str) -> str:
        """A text that may end the answer: an end token there is the engine's to take."""
        parts = self._parts(text)
        ends = getattr(self._tokenizer, "eos_token_ids", ())
        return self._joined(parts[:-1] if parts and parts[-1] in ends else parts)

    def bodies(self, functions: Sequence[dict[str, Any]], choice: ToolChoice) -> None:
        """Each tool has a rule of its own, so that its schema stays a document, whose references hold."""
        for index, function in enumerate(functions):
            self._functions.append(function["name"])
            if self._written.member:
                self._rules.append(f"arguments_{index}: {self._members(function['parameters'], *self._written.member)}")
                continue
            try:
                schema = _arguments(function["parameters"], strict=choice.strict)
            except BadRequest as error:
                raise BadRequest(f"{function['name']}: {error}") from error
            self._rules.append(f"arguments_{index}: %json {_json(schema)}")

    def _members(self, schema: dict[str, Any], before: str, after: str) -> str:
        """Arguments of a schema with simple members, in the schema's order."""
        required = schema.get("required", ())
        written = []
        for key, member in schema.get("properties", {}).items():
            value = f"{self._marker(before.replace('KEY', key))} {self._member(member, after)}"
            written.append(value if key in required else f"({value})?")
        return " ".join(written) or '""'

    def _member(self, schema: dict[str, Any], after: str) -> str:
        """A value and what follows it."""
        end = self._marker(after)
        if schema["type"] != "string":
            return f"%json {_json({key: schema[key] for key in schema.keys() - PROSE})} {end}"
        if texts := _texts(schema):
            return f"({' | '.join(map(_json, texts))}) {end}"
        if isinstance(self._parts(after)[0], int):
            return f"TEXT {end}"
        if "value" not in self._named:
            self._named.add("value")
            written = self._written
            whole = "".join((written.begin, written.head, *(written.member or ()), written.tail, written.end))
            tags = sorted({*_TAG.findall(whole), "<![CDATA["})
            none = f"~/(.|\\n)*({'|'.join(map(_pattern, tags))})(.|\\n)*/"
            self._rules.append(f"value[lazy]: (/(.|\\n)*/ & {none}) {end}")
        return "value"

    # ---- reasoning and marks

    def _reasoning(self) -> str:
        if self._form.thought is None:
            return ""
        begin, end = self._form.thought
        rest = f"{self._through(end, 'thought')} SPACE "
        return rest if self._form.start == "reasoning" else f"({self._marker(begin)} {rest})? "

    def _through(self, marker: str, name: str) -> str:
        """Any text up to and with a marker."""
        parts = self._parts(marker)
        if isinstance(parts[0], int):  # a token of its own ends the text by itself
            return f"TEXT {self._marker(marker)}"
        self._rules.append(f"{name}[lazy]: /(.|\\n)*{_pattern(marker)}/")
        return name

    def _marker(self, marker: str) -> str:
        return self._joined(self._parts(marker))

    def _joined(self, parts: Sequence[int | str]) -> str:
        return " ".join(f"<[{part}]>" if isinstance(part, int) else _json(part) for part in parts)

    def _parts(self, marker: str) -> list[int | str]:
        """A marker as the tokens that are marks and the text between them."""
        marks = {text: token for token, text in self._form.marks.tokens.items() if text in marker}
        if not marks:
            return [marker] if marker else []
        longest_first = "|".join(re.escape(text) for text in sorted(marks, key=len, reverse=True))
        return [marks.get(part, part) for part in re.split(f"({longest_first})", marker) if part]


def _arguments(schema: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    """A tool's schema for one object. What of it cannot be enforced is refused if `strict`, else passed over."""
    return arguments(schema) | {"x-guidance": _SPACING | {"lenient": not strict}}


def _pattern(text: str) -> str:
    """A regular expression for this text, between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\n", r"\n")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True)
