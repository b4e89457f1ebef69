"""The ways to write calls that are known, and how a model's own one is recognized: by its template and its tokens."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from omlx.api.call_syntax import BraceCalls, CallSyntax, HeadedCalls, JsonCalls, PythonCalls, TaggedCalls

# For models whose template knows no tools: this one is explained to them.
GENERIC_CALLS = JsonCalls("<tool_call>", ("</tool_call>",), plain=True)

_NAME = r"(?P<name>[\w.:/-]+)"


class Written(NamedTuple):
    """How calls are written where they are enforced: as the model's templates write them, so that history is the same.

    Each call is `head`, its arguments as JSON and `tail`; several have `between` between them (None: there is only
    one), all of them `begin` and `end` around them. In a head NAME stands for the tool's name, NUMBER for the call's
    number, from 0. `signs`: the template's text or the tokenizer has all of these. `syntax`: which of the format's
    syntaxes reads it. `member`: arguments are no JSON object, but each stands between these two, in which KEY is its
    name.
    """

    head: str
    tail: str = ""
    between: str | None = ""
    begin: str = ""
    end: str = ""
    signs: tuple[str, ...] = ()
    syntax: int = 0
    member: tuple[str, str] | None = None


class CallFormat(NamedTuple):
    """`signs`: a template that has all texts of one of these, or a tokenizer that has them as added tokens, uses it.

    `written`: the one that the template writes is enforced, else the first whose signs are there; without one,
    `GENERIC_WRITTEN`.
    """

    name: str
    signs: tuple[tuple[str, ...], ...]
    calls: tuple[CallSyntax, ...]
    written: tuple[Written, ...] = ()


_OBJECT = '{"name": "NAME", "arguments": '
GENERIC_WRITTEN = Written(f"<tool_call>\n{_OBJECT}", "}\n</tool_call>", "\n")


def _functions(start: str, end: str, *, padded: bool) -> TaggedCalls:
    return TaggedCalls(
        start,
        (end,),
        call=lambda mark: rf"\s*{mark('<function=')}(?P<name>[^\s<>]+)>",
        close=lambda mark: rf"\s*{mark('</function>')}",
        argument=lambda mark: r"\s*<parameter=(?P<key>[^\s<>]+)>",
        value_end="</parameter>",
        padded=padded,
    )


def _keys_and_values(prefix: str) -> TaggedCalls:
    """The name, then a tagged key and a tagged value for each argument (GLM, LongCat)."""
    key, value = f"{prefix}arg_key>", f"{prefix}arg_value>"
    return TaggedCalls(
        f"<{prefix}tool_call>",
        (f"</{prefix}tool_call>",),
        (f"<{key}", f"</{key}", f"<{value}", f"</{value}"),
        call=lambda mark: rf"\s*{_NAME}(?=\s|{mark('<' + key)}|\Z)",
        close=lambda mark: r"\s*\Z",
        argument=lambda mark: rf"\s*{mark('<' + key)}(?P<key>[^<>]*?){mark('</' + key)}\s*{mark('<' + value)}",
        value_end=f"</{value}",
    )


_DSML = "｜DSML｜"
_ATTRIBUTES = r"(?:(?!{end}).)*?"

# The first that fits is taken: what has more specific signs comes first.
CALL_FORMATS = (
    CallFormat(
        "minimax_m2",
        (("<minimax:tool_call>",),),
        (
            TaggedCalls(
                "<minimax:tool_call>",
                ("</minimax:tool_call>",),
                call=lambda mark: r"\s*<invoke name=[\"']?(?P<name>[^\"'<>]+)[\"']?>",
                close=lambda mark: r"\s*</invoke>",
                argument=lambda mark: r"\s*<parameter name=[\"']?(?P<key>[^\"'<>]+)[\"']?>",
                value_end="</parameter>",
            ),
        ),
        (
            Written(
                '<invoke name="NAME">\n',
                "</invoke>\n",
                "",
                "<minimax:tool_call>\n",
                "</minimax:tool_call>",
                member=('<parameter name="KEY">', "</parameter>\n"),
            ),
        ),
    ),
    CallFormat(
        "gemma4",
        (("<|tool_call>", "<tool_call|>"),),
        (BraceCalls("<|tool_call>", ("<tool_call|>",), ('<|"|>',), quote='<|"|>'),),
    ),
    CallFormat(
        "function_gemma",
        (("<start_function_call>",),),
        (BraceCalls("<start_function_call>", ("<end_function_call>",), ("<escape>",), quote="<escape>"),),
    ),
    CallFormat("longcat", (("<longcat_tool_call>",),), (_keys_and_values("longcat_"),)),
    CallFormat(
        "glm47",
        (("<arg_key>",),),
        (_keys_and_values(""),),
        (
            Written(
                "<tool_call>NAME\n",
                "</tool_call>",
                "\n",
                member=("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
            ),
        ),
    ),
    CallFormat(
        "pythonic",
        (("<|tool_list_start|>",), ("<|tool_call_start|>",)),
        (PythonCalls("<|tool_call_start|>", ("<|tool_call_end|>",)),),
    ),
    CallFormat(
        "seed",
        (("<seed:tool_call>",),),
        (_functions("<seed:tool_call>", "</seed:tool_call>", padded=False),),
        (
            Written(
                "<seed:tool_call>\n<function=NAME>\n",
                "</function>\n</seed:tool_call>",
                "\n",
                member=("<parameter=KEY>", "</parameter>\n"),
            ),
        ),
    ),
    CallFormat(
        "qwen3_coder",
        (("<tool_call>", "<function="),),
        (
            _functions("<tool_call>", "</tool_call>", padded=True),
            # The opening mark is often left out.
            TaggedCalls(
                "<function=",
                ("</function>",),
                call=lambda mark: r"(?P<name>[^\s<>]+)>",
                argument=lambda mark: r"\s*<parameter=(?P<key>[^\s<>]+)>",
                close=lambda mark: r"\s*\Z",
                value_end="</parameter>",
                padded=True,
                declared=True,
                alone=True,
                closing="</tool_call>",
            ),
        ),
        (
            Written(
                "<tool_call>\n<function=NAME>\n",
                "</function>\n</tool_call>",
                "\n",
                member=("<parameter=KEY>\n", "\n</parameter>\n"),
            ),
        ),
    ),
    CallFormat(
        "kimi_k2",
        (("<|tool_calls_section_begin|>",),),
        (
            HeadedCalls(
                "<|tool_calls_section_begin|>",
                ("<|tool_calls_section_end|>",),
                ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
                header=lambda mark: (
                    rf"\s*{mark('<|tool_call_begin|>')}\s*(?P<id>(?:functions\.)?(?P<name>[\w./-]+):\d+)\s*"
                    rf"{mark('<|tool_call_argument_begin|>')}"
                ),
                tail=lambda mark: rf"\s*{mark('<|tool_call_end|>')}",
            ),
        ),
        (
            Written(
                "<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
                begin="<|tool_calls_section_begin|>",
                end="<|tool_calls_section_end|>",
            ),
        ),
    ),
    CallFormat(
        "kimi_k3",
        (("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),),
        (
            TaggedCalls(
                "<|open|>tools<|sep|>",
                ("<|close|>tools<|sep|>",),
                ("<|open|>", "<|close|>", "<|sep|>"),
                call=lambda mark: (
                    rf"\s*{mark('<|open|>')}call\b{_ATTRIBUTES.format(end=mark('<|sep|>'))}\btool=\"(?P<name>[^\"]*)\""
                    rf"{_ATTRIBUTES.format(end=mark('<|sep|>'))}{mark('<|sep|>')}"
                ),
                close=lambda mark: rf"\s*{mark('<|close|>call<|sep|>')}",
                argument=lambda mark: (
                    rf"\s*{mark('<|open|>')}argument\b{_ATTRIBUTES.format(end=mark('<|sep|>'))}\bkey=\"(?P<key>[^\"]*)\""
                    rf"(?:{_ATTRIBUTES.format(end=mark('<|sep|>'))}\btype=\"(?P<kind>[^\"]*)\")?"
                    rf"{_ATTRIBUTES.format(end=mark('<|sep|>'))}{mark('<|sep|>')}"
                ),
                value_end="<|close|>argument<|sep|>",
                whole=(
                    lambda mark: (
                        rf"\s*{mark('<|open|>')}json\b{_ATTRIBUTES.format(end=mark('<|sep|>'))}{mark('<|sep|>')}"
                    ),
                    "<|close|>json<|sep|>",
                ),
            ),
        ),
    ),
    CallFormat(
        "minicpm5",
        (('<function name="', '<param name="'),),
        (
            TaggedCalls(
                "<function name=",
                ("</function>",),
                call=lambda mark: r"\s*[\"'](?P<name>[^\"'<>]+)[\"']\s*>",
                close=lambda mark: r"\s*\Z",
                argument=lambda mark: r"\s*<param\s+name\s*=\s*[\"'](?P<key>[^\"'<>]+)[\"']\s*>",
                value_end="</param>",
            ),
        ),
    ),
    CallFormat(
        "mistral",
        (("[TOOL_CALLS]",),),
        (
            HeadedCalls(
                "[TOOL_CALLS]",
                (),
                ("[ARGS]", "[CALL_ID]"),
                header=lambda mark: (
                    rf"\s*(?:{mark('[TOOL_CALLS]')}\s*)?(?P<name>[\w.-]+)\s*"
                    rf"(?:{mark('[CALL_ID]')}\s*(?P<id>[\w-]+)\s*)?{mark('[ARGS]')}"
                ),
            ),
        ),
        (
            Written("[TOOL_CALLS]NAME[ARGS]", signs=("[ARGS]",)),
            Written(_OBJECT, "}", ", ", "[TOOL_CALLS][", "]"),
        ),
    ),
    CallFormat(
        "muse_spark",
        (("<atem:function_calls>",),),
        (
            TaggedCalls(
                "<atem:function_calls>",
                ("</atem:function_calls>",),
                call=lambda mark: r"\s*<atem:invoke\b[^<>]*?\bname=\"(?P<name>[^\"]+)\"[^<>]*>",
                close=lambda mark: r"\s*</atem:invoke>",
                argument=lambda mark: (
                    r"\s*<atem:parameter\b[^<>]*?\bname=\"(?P<key>[^\"]+)\""
                    r"(?:[^<>]*?\bstring=\"(?P<kind>[^\"]*)\")?[^<>]*>"
                ),
                value_end="</atem:parameter>",
            ),
        ),
    ),
    CallFormat(
        "deepseek_v32",
        ((_DSML,),),
        (
            TaggedCalls(
                f"<{_DSML}function_calls>",
                (f"</{_DSML}function_calls>",),
                (_DSML,),
                call=lambda mark: rf"\s*{mark(f'<{_DSML}invoke')}\s+name=\"(?P<name>[^\"]+)\"\s*>",
                close=lambda mark: rf"\s*{mark(f'</{_DSML}invoke>')}",
                argument=lambda mark: (
                    rf"\s*{mark(f'<{_DSML}parameter')}\s+name=\"(?P<key>[^\"]+)\"(?:\s+string=\"(?P<kind>[^\"]*)\")?\s*>"
                ),
                value_end=f"</{_DSML}parameter>",
            ),
        ),
    ),
    CallFormat(
        "deepseek",
        (("<｜tool▁calls▁begin｜>",),),
        (
            HeadedCalls(
                "<｜tool▁calls▁begin｜>",
                ("<｜tool▁calls▁end｜>",),
                ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
                header=lambda mark: (
                    rf"\s*{mark('<｜tool▁call▁begin｜>')}\s*(?:function{mark('<｜tool▁sep｜>')})?{_NAME}"
                    rf"[ \t]*(?:{mark('<｜tool▁sep｜>')}|\n)"
                ),
                tail=lambda mark: rf"\s*{mark('<｜tool▁call▁end｜>')}",
            ),
        ),
        (
            Written(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
                "\n```<｜tool▁call▁end｜>",
                "\n",
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁calls▁end｜>",
                signs=("```json",),
            ),
            Written(
                "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
                "<｜tool▁call▁end｜>",
                begin="<｜tool▁calls▁begin｜>",
                end="<｜tool▁calls▁end｜>",
            ),
        ),
    ),
    CallFormat(
        "cohere",
        (("<|START_ACTION|>",),),
        (JsonCalls("<|START_ACTION|>", ("<|END_ACTION|>",)),),
        (
            Written(
                '    {"tool_call_id": "NUMBER", "tool_name": "NAME", "parameters": ',
                "}",
                ",\n",
                "<|START_ACTION|>[\n",
                "\n]<|END_ACTION|>",
            ),
        ),
    ),
    CallFormat(
        "harmony",
        (("<|channel|>", "<|message|>"),),
        (
            # A call's name stands in the header of a message.
            HeadedCalls(
                "",
                ("<|call|>", "<|end|>"),
                ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|return|>"),
                header=lambda mark: (
                    rf"\s*(?:(?!{mark('<|message|>')}).)*?\bto=(?:functions\.)?{_NAME}"
                    rf"(?:(?!{mark('<|message|>')}).)*{mark('<|message|>')}"
                ),
            ),
        ),
        (
            Written(
                "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
                "<|call|>",
                None,
                signs=("<|constrain|>",),
            ),
            Written("<|channel|>commentary to=functions.NAME<|message|>", "<|call|>", None),
            # gpt-oss is trained on both, and its template writes this one.
            Written(" to=functions.NAME<|channel|>commentary json<|message|>", "<|call|>", None),
        ),
    ),
    CallFormat(
        "phi4",
        (("<|tool|>", "<|/tool|>"), ("<|tool_call|>", "<|/tool_call|>")),
        (
            JsonCalls("<|tool_call|>", ("<|/tool_call|>",)),
            JsonCalls("functools[", bare=True, declared=True, prefix="functools"),
        ),
        (
            Written(_OBJECT, "}", ", ", "<|tool_call|>[", "]<|/tool_call|>", signs=("<|tool_call|>",)),
            Written(_OBJECT, "}", ", ", "functools[", "]", syntax=1),
        ),
    ),
    CallFormat(
        "granite",
        (("<|tool_call|>",),),
        (JsonCalls("<|tool_call|>"),),
        (Written(_OBJECT, "}", ", ", "<|tool_call|>[", "]"),),
    ),
    CallFormat("json_tools", (("<tool_call>",),), (GENERIC_CALLS,), (GENERIC_WRITTEN,)),
    CallFormat(
        "command_r",
        (("Action:", "tool_name"),),
        (JsonCalls("Action:", declared=True),),
        (Written('{"tool_name": "NAME", "parameters": ', "}", ", ", "Action: ```json\n[", "]\n```"),),
    ),
    CallFormat(
        "llama",
        (("<|python_tag|>",), ('"name": function name',)),
        (
            JsonCalls("<|python_tag|>"),
            JsonCalls("{", bare=True, declared=True),
            PythonCalls("[", bare=True, declared=True),
            HeadedCalls(
                "<function=",
                ("</function>",),
                header=lambda mark: r"\s*(?P<name>[^\s<>]+)>",
            ),
        ),
        (Written('{"name": "NAME", "parameters": ', "}", None, syntax=1),),
    ),
)

_BY_NAME = {known.name: known for known in CALL_FORMATS}
# mlx-lm's names of the same format.
_ALIASES = {"laguna": "glm47"}


def by_name(parser: str) -> CallFormat | None:
    """The format that mlx-lm's tool parser of this name reads; None if it is not known here."""
    return _BY_NAME.get(_ALIASES.get(parser, parser))


def recognized(template: str, added: Mapping[str, Any], parser: str | None) -> CallFormat | None:
    """The format in which a model writes calls, None if there is no sign of one.

    The template's text decides, then the parser that the model's settings name for mlx-lm, then the `added` tokens.
    """
    shown = _first(lambda sign: sign in template)
    if shown is None and parser is not None:
        shown = by_name(parser)
    return shown if shown is not None else _first(lambda sign: sign in added)


def _first(known: Any) -> CallFormat | None:
    return next(
        (item for item in CALL_FORMATS if any(all(known(sign) for sign in signs) for signs in item.signs)), None
    )
