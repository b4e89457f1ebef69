"""A model whose answers are chosen: it solves one small task by running commands with whatever tool the agent has.

The answer depends on the prompt alone, as a real model's does: on the tools it lists and on the command outputs that
came back. So agents that send titles, summaries or side requests get an answer too.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omlx.engine.pool import EnginePool
from omlx.request import Request
from omlx.scheduler import SchedulerConfig
from omlx.server import create_app
from omlx.settings import Settings
from omlx.testing import make_tiny_model
from tests.api.fakes import FakeEngine, FakePool
from tests.api.serving import served
from tests.small_tokenizers import TOOL_TEMPLATE, with_tools

NAME = "scripted"
TASK = "Change alpha to beta in notes.txt and tell me what it holds."
FINAL = "notes.txt holds beta-42 now."
# (what a command's output shows when the step is done, the command). "$((6*7))" keeps the output out of the command.
STEPS = (
    ("alpha-42", "echo alpha-$((6*7)) > notes.txt && cat notes.txt"),
    ("beta-42", "sed -i.bak s/alpha/beta/ notes.txt && cat notes.txt"),
)

# Refuses what Qwen3.5 and Mistral's templates refuse: a late or second system message, an unknown role, two user
# messages in a row, arguments that are no mapping, a result without a call.
STRICT_CHECKS = """\
{%- set ns = namespace(user=false, call=false) -%}
{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first -%}
{{- raise_exception('System message must be at the beginning.') -}}
{%- elif message.role not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception('Unexpected message role.') -}}
{%- elif message.role == 'user' and ns.user -%}
{{- raise_exception('Roles must alternate.') -}}
{%- elif message.role == 'tool' and not ns.call -%}
{{- raise_exception('A result needs a call.') -}}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- for key, value in call.function.arguments.items() -%}{%- endfor -%}
{%- endfor -%}
{%- if message.role != 'tool' -%}{%- set ns.call = message.tool_calls is defined and message.tool_calls -%}{%- endif -%}
{%- if message.role != 'system' -%}{%- set ns.user = message.role == 'user' -%}{%- endif -%}
{%- endfor -%}
"""
TEMPLATES = {"free": TOOL_TEMPLATE, "strict": STRICT_CHECKS + TOOL_TEMPLATE}

# Tools that run a command, as agents name them, each with the arguments it takes.
_RUNNERS = ("exec_command", "shell_command", "shell", "run_shell_command", "run_commands", "Bash", "bash")


class ScriptedEngine(FakeEngine):
    """Works through STEPS, then says FINAL; without a tool that runs commands it answers with a title."""

    def __init__(self, template: str) -> None:
        super().__init__(name=NAME, context_length=1_000_000)
        self.tokenizer = with_tools(template=TEMPLATES[template])
        self.vocab_size = len(self.tokenizer)

    def _answer(self, request: Request) -> list[int]:
        reply = _reply(self.tokenizer.decode(request.prompt))
        return [*self.tokenizer.encode(reply), self.tokenizer.eos_token_id]


def _reply(prompt: str) -> str:
    tools = dict(_tools(prompt))
    runner = next((name for name in _RUNNERS if name in tools), None)
    if runner is None:
        return "Notes"
    for shown, command in STEPS:
        if shown not in prompt:
            call = {"name": runner, "arguments": _arguments(tools[runner], command)}
            return f"Next step.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return FINAL


def _tools(prompt: str) -> Iterable[tuple[str, dict[str, Any]]]:
    """The names and parameters of the tools that the template has listed."""
    listed = re.search(r"<tools>(.*?)</tools>\n", prompt, re.DOTALL)
    for line in listed[1].splitlines() if listed else ():
        function = json.loads(line)["function"]
        yield function["name"], function.get("parameters") or {}


def _arguments(parameters: dict[str, Any], command: str) -> dict[str, Any]:
    """The command in the argument that takes it; what else the tool requires gets a harmless value of its type."""
    fields = parameters["properties"]
    key = next(name for name in ("command", "cmd", "commands") if name in fields)
    harmless = {"string": "run", "boolean": False, "integer": 1, "number": 1}
    filled = {name: harmless[fields[name]["type"]] for name in parameters.get("required", ()) if name != key}
    if key == "commands":
        return filled | {key: [command]}
    is_list = fields[key].get("type") == "array"
    return filled | {key: ["bash", "-c", command] if is_list else command}


class DefaultPool(EnginePool):
    """The real pool as `--default-model scripted` makes it, with the scripted model in the place of a loaded one."""

    def __init__(self, engine: ScriptedEngine, home: Path) -> None:
        make_tiny_model(home / "models" / NAME)
        super().__init__(SchedulerConfig(max_process_memory=0), home, default_model=NAME)
        self._engine: Any = engine

    async def get(self, name: str) -> Any:
        assert self._served(name, writes=True).name == NAME
        return self._engine


@contextmanager
def serving(template: str, home: Path, *, default: bool = False) -> Iterator[tuple[str, ScriptedEngine]]:
    """The scripted model on a free port: the server's address, and the engine that saw the requests.

    `default`: it answers for every name.
    """
    engine = ScriptedEngine(template)
    pool = DefaultPool(engine, home) if default else FakePool(engine)
    with served(create_app(pool, Settings(home=home))) as address:
        yield address, engine
