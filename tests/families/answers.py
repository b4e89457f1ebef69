"""What models of each family write when they think and call a tool twice, and what tells their format."""

from dataclasses import dataclass

from mlx_lm.tokenizer_utils import TokenizerWrapper

from tests.small_tokenizers import with_marks

THOUGHT = "Two cities, hm."
CITIES = ("Köln", "Bonn")
NAME = "get_weather"


@dataclass(frozen=True)
class Scripted:
    """`template`: what is told of the format in the chat template; `tokens`: marks that are tokens of their own.

    `answer`: text that the model writes after a prompt which ends with `prompt_end`.
    """

    answer: str
    template: str = ""
    tokens: tuple[str, ...] = ()
    prompt_end: str = ""
    thinks: bool = True
    knows_tools: bool = True

    def tokenizer(self) -> TokenizerWrapper:
        template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
        tools = "{{ tools }}" if self.knows_tools else ""
        return with_marks(f"{{# {self.template} #}}{template}{tools}{self.prompt_end}", self.tokens)


def _twice(call: str, between: str = "") -> str:
    """A call of each city: `CITY` stands for it, `NUMBER` for the call's number."""
    calls = [call.replace("CITY", city).replace("NUMBER", str(number)) for number, city in enumerate(CITIES)]
    return between.join(calls)


_HERMES = _twice('<tool_call>\n{"name": "get_weather", "arguments": {"city": "CITY"}}\n</tool_call>', "\n")
_OBJECTS = "[" + _twice('{"name": "get_weather", "arguments": {"city": "CITY"}}', ", ") + "]"
_PYTHON = "[" + _twice('get_weather(city="CITY")', ", ") + "]"
_THINK = f"<think>\n{THOUGHT}\n</think>\n\n"
_THINK_TOKENS = ("<think>", "</think>")
_TOOL_TOKENS = ("<tool_call>", "</tool_call>")
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
)  # fmt: skip
_QWEN3 = Scripted(_THINK + _HERMES, "<tool_call>", (*_THINK_TOKENS, *_TOOL_TOKENS))
_MISTRAL = Scripted(
    f"[THINK]{THOUGHT}[/THINK]" + _twice('[TOOL_CALLS]get_weather[ARGS]{"city": "CITY"}'),
    "[TOOL_CALLS]",
    ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"),
)

# By the names of docs/MODELS.md.
FAMILIES = {
    "llama": Scripted(
        _twice('{"name": "get_weather", "parameters": {"city": "CITY"}}', "; "),
        '{"name": function name, "parameters": ...} <|python_tag|>',
        ("<|python_tag|>",),
        thinks=False,
    ),
    "qwen2": Scripted(_HERMES, "<tool_call>", _TOOL_TOKENS, thinks=False),
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "gemma3_text": Scripted(
        _twice("<start_function_call>call:get_weather{city:<escape>CITY<escape>}<end_function_call>"),
        "<start_function_call>",
        ("<start_function_call>", "<end_function_call>", "<escape>"),
        thinks=False,
    ),
    "gpt_oss": Scripted(
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
        + _twice(
            '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "CITY"}<|call|>',
            "<|start|>assistant",
        ),
        "<|channel|><|message|>",
        ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>", "<|return|>"),
        prompt_end="<|start|>assistant",
    ),
    "mistral3": _MISTRAL,
    "ministral3": _MISTRAL,
    "phi3": Scripted(
        f"<|tool_call|>{_OBJECTS}<|/tool_call|>",
        "<|tool|><|/tool|>",
        ("<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>"),
        thinks=False,
    ),
    "mamba2": Scripted(_HERMES, thinks=False, knows_tools=False),
    "falcon_h1": Scripted(_THINK + _HERMES, "<think></think><tool_call>"),
    "granitemoehybrid": Scripted(_HERMES, "<tool_call>", _TOOL_TOKENS, thinks=False),
    "qwen3_next": Scripted(
        f"{THOUGHT}\n</think>\n\n" + _HERMES, "<tool_call>", (*_THINK_TOKENS, *_TOOL_TOKENS), prompt_end="<think>\n"
    ),
    "lfm2": Scripted(
        _THINK + f"<|tool_call_start|>{_PYTHON}<|tool_call_end|>",
        "<|tool_list_start|>",
        (*_THINK_TOKENS, "<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "deepseek_v3": Scripted(
        f"{THOUGHT}</think><｜tool▁calls▁begin｜>"
        + _twice('<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "CITY"}<｜tool▁call▁end｜>')
        + "<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>",
        (
            *_THINK_TOKENS, *_DEEPSEEK,
        ),
        prompt_end="<think>",
    ),
    "llama4": Scripted(
        _PYTHON, '{"name": function name, "parameters": ...}', thinks=False
    ),
    "cohere2": Scripted(
        f"<|START_THINKING|>{THOUGHT}<|END_THINKING|><|START_ACTION|>[\n    "
        + _twice('{"tool_call_id": "NUMBER", "tool_name": "get_weather", "parameters": {"city": "CITY"}}', ",\n    ")
        + "\n]<|END_ACTION|>",
        "<|START_ACTION|>",
        (
            "<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
        ),
    ),
}  # fmt: skip

# Formats of further models.
OTHERS = {
    "DeepSeek V3, R1": Scripted(
        f"<think>\n{THOUGHT}\n</think>\n\n<｜tool▁calls▁begin｜>"
        + _twice(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            '{"city": "CITY"}\n```<｜tool▁call▁end｜>',
            "\n",
        )
        + "<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>",
        (*_THINK_TOKENS, *_DEEPSEEK),
    ),
    "DeepSeek V3.2": Scripted(
        f"{THOUGHT}</think>\n\n<｜DSML｜function_calls>\n"
        + _twice(
            '<｜DSML｜invoke name="get_weather">\n'
            '<｜DSML｜parameter name="city" string="true">CITY</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n"
        )
        + "</｜DSML｜function_calls>",
        tokens=(*_THINK_TOKENS, "｜DSML｜"),
        prompt_end="<think>",
    ),
    "Qwen3 Coder, Qwen3.5": Scripted(
        _THINK
        + _twice(
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nCITY\n</parameter>\n</function>\n</tool_call>", "\n"
        ),
        "<tool_call>\n<function=",
        (*_THINK_TOKENS, *_TOOL_TOKENS),
    ),
    "GLM 4.5": Scripted(
        f"\n<think>{THOUGHT}</think>\n"
        + _twice("<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>CITY</arg_value>\n</tool_call>", "\n"),
        "<arg_key>",
        (*_THINK_TOKENS, *_TOOL_TOKENS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "Kimi K2": Scripted(
        f"<think>{THOUGHT}</think><|tool_calls_section_begin|>"
        + _twice(
            "<|tool_call_begin|>functions.get_weather:NUMBER<|tool_call_argument_begin|>"
            '{"city": "CITY"}<|tool_call_end|>'
        )
        + "<|tool_calls_section_end|>",
        "<think></think><|tool_calls_section_begin|>",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
         "<|tool_call_argument_begin|>"),
    ),
    "MiniMax M2": Scripted(
        f"{THOUGHT}\n</think>\n\n<minimax:tool_call>\n"
        + _twice('<invoke name="get_weather">\n<parameter name="city">CITY</parameter>\n</invoke>\n')
        + "</minimax:tool_call>",
        "<minimax:tool_call>",
        (*_THINK_TOKENS, "<minimax:tool_call>", "</minimax:tool_call>"),
        prompt_end="<think>\n",
    ),
    "Seed OSS": Scripted(
        f"<seed:think>{THOUGHT}</seed:think>"
        + _twice(
            "<seed:tool_call>\n<function=get_weather>\n<parameter=city>CITY</parameter>\n</function>\n</seed:tool_call>"
        ),
        "<seed:tool_call>",
        ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
    ),
    "EXAONE Deep": Scripted(
        f"\n{THOUGHT}\n</thought>\n\n{_HERMES}", "<thought>\n </thought>", prompt_end="<thought>\n", knows_tools=False
    ),
    "EXAONE 4": Scripted(f"{THOUGHT}\n</think>\n\n{_HERMES}", "<think></think><tool_call>", prompt_end="<think>\n"),
    "Granite 3": Scripted(
        f"<think>{THOUGHT}</think><|tool_call|>{_OBJECTS}",
        "<think></think><response></response><|tool_call|>",
        ("<|tool_call|>",),
    ),
    "Command R": Scripted(
        "Action: ```json\n["
        + _twice('{"tool_name": "get_weather", "parameters": {"city": "CITY"}}', ", ")
        + "]\n```",
        "Action: tool_name",
        thinks=False,
    ),
    "Phi-4 mini": Scripted(
        f"functools{_OBJECTS}",
        "<|tool|><|/tool|>",
        ("<|tool|>", "<|/tool|>"),
        thinks=False,
    ),
    "Gemma 4": Scripted(
        f"<|channel>thought\n{THOUGHT}<channel|>"
        + _twice('<|tool_call>call:get_weather{city:<|"|>CITY<|"|>}<tool_call|>'),
        "<|tool_call> <tool_call|>",
        ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "Kimi K3": Scripted(
        f"<|open|>think<|sep|>{THOUGHT}<|close|>think<|sep|><|open|>tools<|sep|>"
        + _twice(
            '<|open|>call tool="get_weather" index="NUMBER"<|sep|><|open|>argument key="city" type="string"<|sep|>CITY'
            "<|close|>argument<|sep|><|close|>call<|sep|>"
        )
        + "<|close|>tools<|sep|>",
        tokens=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    ),
    "Muse Spark": Scripted(
        f" to=self<|message|>{THOUGHT}<|eom|>\n<atem:function_calls>\n"
        + _twice(
            '<atem:invoke name="get_weather">\n<atem:parameter name="city">CITY</atem:parameter>\n</atem:invoke>\n'
        )
        + "</atem:function_calls>",
        "<atem:function_calls>",
        ("<|message|>", "<|eom|>", "<|eot|>"),
    ),
    "Llama 3, python tag": Scripted(
        "<|python_tag|>" + _twice('{"name": "get_weather", "parameters": {"city": "CITY"}}', "; "),
        "<|python_tag|>",
        ("<|python_tag|>",),
        thinks=False,
    ),
}  # fmt: skip
