"""The agent of benchmarks/agent_session.py on a tiny model: what its turns compute, and that its work is real."""

import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from omlx.engine.pool import EnginePool
from omlx.server import create_app
from omlx.settings import Settings
from omlx.testing import make_tiny_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TURNS = 5


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("scripted_agent")


@pytest.fixture
def allowed(agent: ModuleType) -> ModuleType:
    """The bar: what a turn may compute again."""
    return importlib.import_module("conversation").allowed


@asynccontextmanager
async def serving(home: Path, mode: str) -> AsyncIterator[httpx.AsyncClient]:
    settings = Settings(home=home, exact=mode, paged_ssd_cache_dir=home / "cache")
    pool = EnginePool(settings.scheduler_config(), home)
    app = create_app(pool, settings)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 50_000))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=60) as client:
            yield client


@pytest.mark.parametrize("mode", ["on", "off"])
async def test_an_agents_turns_compute_what_is_new_in_both_dialects_also_after_a_restart(
    agent, allowed, tmp_path, mode
):
    make_tiny_model(tmp_path / "models" / "tiny", layers=1, context=8192)
    sessions = [
        agent.AgentSession(dialect, agent.Workspace.made(tmp_path / dialect.name), "tiny", dialect.name)
        for dialect in (agent.OpenAIDialect(), agent.AnthropicDialect())
    ]
    plan = agent.steps(TURNS)
    for part in (plan[:2], plan[2:]):
        async with serving(tmp_path, mode) as client:
            for tool in part:
                for session in sessions:
                    await session.turn(client, tool)
    one, other = sessions
    for session in sessions:
        first, *later = session.turns
        assert first.reply.cached_tokens == 0
        for turn in later:
            assert turn.new > 0
            assert turn.beyond <= allowed(mode, turn.known), turn
    assert one.results == other.results
    assert "0 passed, 4 failed" in one.results[0] and "stats.mean" in one.results[1]
    assert "/ len(values)" in (one.workspace.folder / "stats.py").read_text()
    # Both say the same to the model.
    assert [turn.reply.prompt_tokens for turn in one.turns] == [turn.reply.prompt_tokens for turn in other.turns]


def test_the_plan_mends_what_the_tests_find(agent, tmp_path):
    workspace = agent.Workspace.made(tmp_path / "work")
    tools = {tool.name: tool for tool in agent.TOOLS}
    found = [workspace.do(tools[name].arguments) for name in agent.PLAN]
    ran = [text.splitlines()[-1] for name, text in zip(agent.PLAN, found, strict=True) if name == "run_tests"]
    assert ran[:-2] == ["0 passed, 4 failed", "1 passed, 3 failed", "2 passed, 2 failed", "3 passed, 1 failed"]
    assert ran[-2:] == [agent.ALL_PASSED] * 2
    assert "nothing was changed" in workspace.do(tools["edit_mean"].arguments)
