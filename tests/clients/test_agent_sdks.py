"""Agent SDKs for Python in the tool loop of test_agents.py, each in the dialects that it speaks."""

import json
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import agents
import anthropic
import litellm
import openai
import pytest
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.documented import block
from tests.clients.scripted import FINAL, NAME, TASK, TEMPLATES, serving
from tests.clients.test_agents import Server, check

# The SDKs warn of each other's versions and of their own plans.
pytestmark = pytest.mark.filterwarnings("ignore")

KEY = "none"
Bash = Callable[[str], str]


@pytest.fixture(params=list(TEMPLATES))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with serving(request.param, tmp_path / "omlx") as (address, engine):
        yield Server(address, engine)


def run_block(name: str, address: str) -> dict[str, Any]:
    """What the Python block of docs/CLIENTS.md defines."""
    defined: dict[str, Any] = {}
    exec(block(name, address, NAME), defined)
    return defined


async def openai_agents(address: str, bash: Bash, dialect: str) -> str:
    agents.set_tracing_disabled(True)
    made = run_block("openai-agents", address)
    client, model = made["client"], made["model"]
    if dialect == "chat":
        model = agents.OpenAIChatCompletionsModel(model=NAME, openai_client=client)
    agent = agents.Agent(name="a", instructions="Be careful.", model=model, tools=[agents.function_tool(bash)])
    try:
        return str((await agents.Runner.run(agent, TASK)).final_output)
    finally:
        await client.close()


async def pydantic_ai(address: str, bash: Bash, dialect: str) -> str:
    model: Any
    client: Any
    if dialect == "anthropic":
        client = anthropic.AsyncAnthropic(base_url=address, api_key=KEY, max_retries=0)
        model = AnthropicModel(NAME, provider=AnthropicProvider(anthropic_client=client))
    elif dialect == "responses":
        client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)
        model = OpenAIResponsesModel(NAME, provider=OpenAIProvider(openai_client=client))
    else:
        model = run_block("pydantic-ai", address)["model"]
        client = model.client
    agent = Agent(model, instructions="Be careful.", tools=[bash])
    try:
        return str((await agent.run(TASK)).output)
    finally:
        await client.close()


async def langchain(address: str, bash: Bash, dialect: str) -> str:
    model: Any
    if dialect == "anthropic":
        model = ChatAnthropic(model=NAME, base_url=address, api_key=KEY, max_retries=0)
    elif dialect == "responses":
        model = ChatOpenAI(model=NAME, base_url=f"{address}/v1", api_key=KEY, use_responses_api=True, streaming=True)
    else:
        model = run_block("langchain", address)["model"]
    agent = create_agent(model, tools=[bash], system_prompt="Be careful.")
    result = await agent.ainvoke({"messages": [{"role": "user", "content": TASK}]})
    return str(result["messages"][-1].text)


async def litellm_loop(address: str, bash: Bash, dialect: str) -> str:
    settings = run_block("litellm", address)["settings"]
    if dialect == "anthropic":
        settings |= {"model": f"anthropic/{NAME}", "api_base": address}
    parameters = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    tool = {"type": "function", "function": {"name": "bash", "description": "Run it", "parameters": parameters}}
    messages: list[object] = [{"role": "system", "content": "Be careful."}, {"role": "user", "content": TASK}]
    for _ in range(5):
        answer = await litellm.acompletion(messages=messages, tools=[tool], num_retries=0, **settings)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            output = bash(json.loads(call.function.arguments)["command"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    raise AssertionError("the loop did not end")


SDKS: dict[str, tuple[Callable[[str, Bash, str], Awaitable[str]], tuple[str, ...]]] = {
    "openai-agents": (openai_agents, ("chat", "responses")),
    "pydantic-ai": (pydantic_ai, ("chat", "responses", "anthropic")),
    "langchain": (langchain, ("chat", "responses", "anthropic")),
    "litellm": (litellm_loop, ("chat", "anthropic")),
}


@pytest.mark.parametrize(
    ("sdk", "dialect"), [(sdk, dialect) for sdk, (_, dialects) in SDKS.items() for dialect in dialects]
)
async def test_an_sdk_works_through_its_task(sdk, dialect, server, tmp_path):
    def bash(command: str) -> str:
        """Run a command in the folder."""
        return subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    run, _ = SDKS[sdk]
    assert FINAL in await run(server.address, bash, dialect)
    check(server, tmp_path)
