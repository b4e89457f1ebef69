"""A scripted agent at work on real files, in OpenAI's or Anthropic's dialect.

Each turn the script names the tool that the model has to call; the model writes the call, held to the tool's schema,
which leaves one set of arguments: so every session takes the same way, whatever the model is. What the call says is
really done (a file is read or changed, a program is run), and its real outcome is the next message. The history that
goes back is what the server has answered, as it came.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

Json = dict[str, Any]

SYSTEM = """\
You are a careful programmer. You work in one folder, with the tools that you are given, and never guess what a file
holds: read it first. Change as little as possible. After every change run the tests again, and go on until all of
them pass. Say in one short sentence what you did when you are done."""
TASK = "Some tests of stats.py fail. Find out why and mend stats.py, not the tests."
MAX_TOKENS = 300
SUMMARY_TOKENS = 24
RUN_TIMEOUT_S = 60.0

MODULE = '''\
"""Figures of a list of numbers."""


def mean(values):
    return sum(values) / (len(values) + 1)


def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle] + ordered[middle + 1]) / 2


def spread(values):
    return max(values) + min(values)


def mode(values):
    return min(values, key=values.count)
'''
TESTS = """\
import stats

CASES = [
    (stats.mean, [1, 2, 6], 3),
    (stats.median, [4, 1, 2, 3], 2.5),
    (stats.spread, [3, 9, 5], 6),
    (stats.mode, [2, 7, 7, 1], 7),
]
failed = 0
for function, values, wanted in CASES:
    found = function(values)
    if found != wanted:
        failed += 1
        print(f"FAILED {function.__name__}({values}): {found}, not {wanted}")
print(f"{len(CASES) - failed} passed, {failed} failed")
"""
ALL_PASSED = "4 passed, 0 failed"


@dataclass(frozen=True, slots=True)
class Tool:
    """One thing that may be done; the arguments' names say which kind it is of (see `Workspace.do`)."""

    name: str
    description: str
    arguments: dict[str, str]

    @property
    def schema(self) -> Json:
        """With one set of arguments that fits it."""
        fields = {name: {"type": "string", "const": value} for name, value in self.arguments.items()}
        return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def _edit(what: str, old: str, new: str) -> Tool:
    arguments = {"path": "stats.py", "old": old, "new": new}
    return Tool(f"edit_{what}", f"Replace a text in the function {what}", arguments)


TOOLS = (
    Tool("read_module", "Read the module", {"path": "stats.py"}),
    Tool("read_tests", "Read the tests", {"path": "test_stats.py"}),
    Tool("run_tests", "Run the tests; gives what they print", {"command": "python test_stats.py"}),
    _edit("mean", "(len(values) + 1)", "len(values)"),
    _edit("median", "ordered[middle] + ordered[middle + 1]", "ordered[middle - 1] + ordered[middle]"),
    _edit("spread", "max(values) + min", "max(values) - min"),
    _edit("mode", "min(values, key", "max(values, key"),
)
# The tools of the turns; the last turn, without a call, sums up. 15 turns.
PLAN = (
    "run_tests", "read_tests", "read_module", "edit_mean", "run_tests", "edit_median", "run_tests", "read_module",
    "edit_spread", "run_tests", "edit_mode", "run_tests", "read_module", "run_tests",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Workspace:
    """A folder with the files of the task."""

    folder: Path

    @classmethod
    def made(cls, folder: Path) -> "Workspace":
        folder.mkdir(parents=True)
        (folder / "stats.py").write_text(MODULE)
        (folder / "test_stats.py").write_text(TESTS)
        return cls(folder)

    def do(self, arguments: Json) -> str:
        """What a call's arguments ask for, and what comes of it as the agent would tell the model."""
        if "command" in arguments:
            return self._run(arguments["command"])
        path = self.folder / Path(arguments["path"]).name
        if "old" not in arguments:
            return path.read_text()
        text = path.read_text()
        if text.count(arguments["old"]) != 1:
            return f"the text is there {text.count(arguments['old'])} times; nothing was changed"
        path.write_text(text.replace(arguments["old"], arguments["new"]))
        return f"{path.name} was changed"

    def _run(self, command: str) -> str:
        """The output of `python FILE`. Without bytecode files: two edits within a second must not look like one."""
        words = [sys.executable, "-B", *command.split()[1:]]
        done = subprocess.run(
            words, cwd=self.folder, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
        )
        return done.stdout + done.stderr


@dataclass(slots=True)
class Reply:
    """One streamed answer. Times are seconds; `first` is when the first piece of the answer came."""

    sent: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    ended: float = 0.0
    text: str = ""
    call_id: str = ""
    call_name: str = ""
    call_arguments: str = ""
    reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def came(self) -> None:
        self.first = self.first or time.perf_counter()


class Dialect(Protocol):
    """How one dialect asks, answers and carries results. Keeps the history."""

    name: str
    path: str

    def body(self, tool: str | None) -> Json:
        """The next request; without a tool the model is to write."""

    def take(self, event: Json, reply: Reply) -> None:
        """One event of the streamed answer."""

    def remember(self, reply: Reply, result: str | None) -> None:
        """Puts an answer into the history, and what came of its call."""


class OpenAIDialect:
    """POST /v1/chat/completions."""

    name = "OpenAI"
    path = "/v1/chat/completions"

    def __init__(self) -> None:
        self.messages: list[Json] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]

    def body(self, tool: str | None) -> Json:
        choice: Any = "none" if tool is None else {"type": "function", "function": {"name": tool}}
        tools = [
            {"name": tool.name, "description": tool.description, "parameters": tool.schema, "strict": True}
            for tool in TOOLS
        ]
        return {
            "messages": self.messages, "tools": [{"type": "function", "function": tool} for tool in tools],
            "tool_choice": choice, "stream_options": {"include_usage": True},
        }  # fmt: skip

    def take(self, event: Json, reply: Reply) -> None:
        for choice in event.get("choices", ()):
            self._take_delta(choice["delta"], reply)
            reply.reason = choice.get("finish_reason") or reply.reason
        if usage := event.get("usage"):
            reply.prompt_tokens, reply.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            reply.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]

    def _take_delta(self, delta: Json, reply: Reply) -> None:
        if delta.get("content") or delta.get("tool_calls"):
            reply.came()
        reply.text += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            reply.call_id += call.get("id") or ""
            reply.call_name += call["function"].get("name") or ""
            reply.call_arguments += call["function"].get("arguments") or ""

    def remember(self, reply: Reply, result: str | None) -> None:
        message: Json = {"role": "assistant", "content": reply.text or None}
        self.messages.append(message)
        if result is not None:
            function = {"name": reply.call_name, "arguments": reply.call_arguments}
            message["tool_calls"] = [{"id": reply.call_id, "type": "function", "function": function}]
            self.messages.append({"role": "tool", "tool_call_id": reply.call_id, "content": result})


class AnthropicDialect:
    """POST /v1/messages."""

    name = "Anthropic"
    path = "/v1/messages"

    def __init__(self) -> None:
        self.messages: list[Json] = [{"role": "user", "content": [{"type": "text", "text": TASK}]}]

    def body(self, tool: str | None) -> Json:
        tools = [
            {"name": tool.name, "description": tool.description, "input_schema": tool.schema, "strict": True}
            for tool in TOOLS
        ]
        choice = {"type": "none"} if tool is None else {"type": "tool", "name": tool}
        system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
        return {"system": system, "messages": self.messages, "tools": tools, "tool_choice": choice}

    def take(self, event: Json, reply: Reply) -> None:
        match event["type"]:
            case "content_block_start":
                block = event["content_block"]
                if block["type"] == "tool_use":
                    reply.came()
                    reply.call_id, reply.call_name = block["id"], block["name"]
            case "content_block_delta":
                reply.came()
                reply.text += event["delta"].get("text", "")
                reply.call_arguments += event["delta"].get("partial_json", "")
            case "message_delta":
                self._take_usage(event["usage"], reply)
                reply.reason = event["delta"]["stop_reason"]

    def _take_usage(self, usage: Json, reply: Reply) -> None:
        reply.cached_tokens = usage["cache_read_input_tokens"]
        reply.prompt_tokens = usage["input_tokens"] + usage["cache_creation_input_tokens"] + reply.cached_tokens
        reply.completion_tokens = usage["output_tokens"]

    def remember(self, reply: Reply, result: str | None) -> None:
        blocks: list[Json] = [{"type": "text", "text": reply.text}] if reply.text else []
        self.messages.append({"role": "assistant", "content": blocks})
        if result is not None:
            arguments = json.loads(reply.call_arguments)
            blocks.append({"type": "tool_use", "id": reply.call_id, "name": reply.call_name, "input": arguments})
            given = {"type": "tool_result", "tool_use_id": reply.call_id, "content": result}
            self.messages.append({"role": "user", "content": [given]})


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One request. `new` counts the prompt tokens behind what the server had: the last prompt and its answer."""

    tool: str | None
    reply: Reply
    new: int

    @property
    def known(self) -> int:
        return self.reply.prompt_tokens - self.new

    @property
    def ttft(self) -> float:
        """Seconds to the first piece of the answer."""
        return self.reply.first - self.reply.sent

    @property
    def computed(self) -> int:
        return self.reply.prompt_tokens - self.reply.cached_tokens

    @property
    def beyond(self) -> int:
        """Prompt tokens computed although their state had been computed before."""
        return max(0, self.computed - self.new)


class AgentError(Exception):
    """The server did not answer as the dialect or the script wants."""


@dataclass(slots=True)
class AgentSession:
    """One agent's work with one server. `salt` keeps its cache apart from that of others who do the same."""

    dialect: Dialect
    workspace: Workspace
    model: str
    salt: str = ""
    turns: list[AgentTurn] = field(default_factory=list)
    results: list[str] = field(default_factory=list)

    async def turn(self, client: httpx.AsyncClient, tool: str | None) -> AgentTurn:
        """Has the model call `tool` and does what the call says; without a tool, has it write. Raises AgentError."""
        reply = await self._ask(client, tool)
        if tool is not None and reply.call_name != tool:
            raise AgentError(f"{self.dialect.name}: {reply.call_name!r} was called, not {tool!r}: {reply}")
        result = self.workspace.do(json.loads(reply.call_arguments)) if tool is not None else None
        self.dialect.remember(reply, result)
        self.results += [] if result is None else [result]
        last = self.turns[-1].reply if self.turns else Reply()
        new = reply.prompt_tokens - last.prompt_tokens - last.completion_tokens
        self.turns.append(AgentTurn(tool, reply, new))
        return self.turns[-1]

    async def _ask(self, client: httpx.AsyncClient, tool: str | None) -> Reply:
        body = self.dialect.body(tool) | {"model": self.model, "stream": True, "temperature": 0}
        body["max_tokens"] = MAX_TOKENS if tool else SUMMARY_TOKENS
        if self.salt:
            body["cache_salt"] = self.salt
        reply = Reply()
        async with client.stream("POST", self.dialect.path, json=body) as response:
            if response.status_code != 200:
                raise AgentError(f"{self.dialect.name}: status {response.status_code}: {(await response.aread())!r}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise AgentError(f"{self.dialect.name}: {event['error']}")
                    self.dialect.take(event, reply)
        reply.ended = time.perf_counter()
        if not (reply.reason and reply.prompt_tokens and reply.first):
            raise AgentError(f"{self.dialect.name}: the answer had no text, no end or no usage: {reply}")
        return reply


def steps(turns: int) -> Sequence[str | None]:
    """The tools of a session of so many turns, at least 2; None stands for the turn that sums up."""
    return [*PLAN[: turns - 1], None]
