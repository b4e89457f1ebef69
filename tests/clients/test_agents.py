"""Real coding agents and agent SDKs in a tool loop with several turns, against a model whose answers are chosen.

Each runs on a template that takes everything and on one that refuses what strict templates refuse. A command runs for
real in a folder of its own: the file has to be there, and the agent has to report the last answer. Each is set up by
its block of docs/CLIENTS.md.
"""

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.clients.documented import block, variables
from tests.clients.scripted import FINAL, NAME, STEPS, TASK, TEMPLATES, ScriptedEngine, serving
from tests.clients.test_node import node

HERE = Path(__file__).parent / "agents"
MODULES = HERE / "node_modules"
SYSTEM = f"{sys.platform}-{ {'x86_64': 'x64', 'aarch64': 'arm64'}.get(platform.machine(), platform.machine()) }"
Started = tuple[list[str | Path], dict[str, str]]
"""A command, and the variables that it needs."""


class Server(NamedTuple):
    address: str
    engine: ScriptedEngine


@pytest.fixture(params=list(TEMPLATES))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with serving(request.param, tmp_path / "omlx") as (address, engine):
        yield Server(address, engine)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the agent works."""
    made = tmp_path / "work"
    made.mkdir()
    return made


def installed(name: str) -> Path:
    path = MODULES / name
    if not path.exists():
        pytest.skip(f"{name} is not installed; `make test` does that")
    return path


def codex(address: str, folder: Path, home: Path) -> Started:
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(block("codex", address, NAME))
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [node(), installed("@openai/codex") / "bin" / "codex.js", "exec", *flags, TASK], {}


def claude_code(address: str, folder: Path, home: Path) -> Started:
    program = installed(f"@anthropic-ai/claude-code-{SYSTEM}") / "claude"
    environ = variables("claude-code", address, NAME) | {"IS_SANDBOX": "1"}  # the tests may run as root
    return [program, "-p", TASK, "--dangerously-skip-permissions"], environ


def opencode(address: str, folder: Path, home: Path) -> Started:
    (folder / "opencode.json").write_text(block("opencode", address, NAME))
    unattended = {"OPENCODE_PERMISSION": '{"*": "allow"}', "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    program = installed(f"opencode-{SYSTEM}") / "bin" / "opencode"
    return [program, "run", TASK], unattended | {"OPENCODE_DISABLE_MODELS_FETCH": "1"}


def qwen_code(address: str, folder: Path, home: Path) -> Started:
    command = [node(), installed("@qwen-code/qwen-code") / "cli.js", "-y", "-p", TASK]
    return command, variables("qwen-code", address, NAME)


def cline(address: str, folder: Path, home: Path) -> Started:
    program = installed("cline").parent / ".bin" / "cline"
    signed_in = block("cline", address, NAME).replace("cline auth", f"'{program}' auth", 1)
    return ["bash", "-ec", f"{signed_in} < /dev/null\n'{program}' -P openai -m {NAME} '{TASK}'"], {}


def continue_cli(address: str, folder: Path, home: Path) -> Started:
    config = home / "config.yaml"
    config.write_text(block("continue", address, NAME))
    program = installed("@continuedev/cli") / "dist" / "cn.js"
    return [node(), program, "--config", config, "-p", TASK, "--auto"], {}


def ai_sdk(address: str, folder: Path, home: Path) -> Started:
    return ai_sdk_loop(block("ai-sdk", address, NAME), folder)


def ai_sdk_anthropic(address: str, folder: Path, home: Path) -> Started:
    settings = f'{{ baseURL: "{address}/v1", apiKey: "none" }}'
    imported = 'import { createAnthropic } from "@ai-sdk/anthropic";'
    return ai_sdk_loop(f'{imported}\nconst model = createAnthropic({settings})("{NAME}");\n', folder)


def ai_sdk_loop(model: str, folder: Path) -> Started:
    """`model` is code that makes the model for the loop of agents/ai.mjs."""
    script = folder / "loop.mjs"
    script.write_text(model + (HERE / "ai.mjs").read_text())
    (folder / "node_modules").symlink_to(installed("ai").parent)
    return [node(), script], {"TASK": TASK}


AGENTS = {
    "codex": codex,
    "claude-code": claude_code,
    "opencode": opencode,
    "qwen-code": qwen_code,
    "cline": cline,
    "continue": continue_cli,
    "ai-sdk": ai_sdk,
    "ai-sdk-anthropic": ai_sdk_anthropic,
}


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_works_through_its_task(agent, server, folder, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    command, environ = AGENTS[agent](server.address, folder, home)
    fixed = {"PATH": f"{node().parent}{os.pathsep}{os.environ['PATH']}", "HOME": str(home), "NO_COLOR": "1"}
    done = subprocess.run(
        command, cwd=folder, env=fixed | environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=250, check=False,
    )  # fmt: skip
    end_daemons(home)
    assert done.returncode == 0, done.stderr[-2000:]
    assert FINAL in done.stdout
    check(server, folder)


def end_daemons(home: Path) -> None:
    """Cline leaves a process of its own running."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "--cline-hub-daemon" in process.cmdline() and process.environ().get("HOME") == str(home):
                process.kill()


@pytest.mark.parametrize("template", list(TEMPLATES))
def test_two_variables_are_enough_for_claude_code(template, folder, tmp_path):
    """It asks for the names of Anthropic's models, which --default-model maps to the one that is served."""
    (tmp_path / "home").mkdir()
    with serving(template, tmp_path / "omlx", default=True) as (address, engine):
        command, environ = claude_code(address, folder, tmp_path / "home")
        two = {name: environ[name] for name in ("ANTHROPIC_BASE_URL", "ANTHROPIC_AUTH_TOKEN")}
        quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1"}
        home = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home")}
        done = subprocess.run(
            command, cwd=folder, env=home | two | quiet, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=250, check=False,
        )  # fmt: skip
        assert done.returncode == 0 and FINAL in done.stdout, done.stderr[-2000:]
        check(Server(address, engine), folder)


def check(server: Server, folder: Path) -> None:
    """The commands ran, in order, each from an answer of its own."""
    assert (folder / "notes.txt").read_text() == "beta-42\n"
    assert (folder / "notes.txt.bak").read_text() == "alpha-42\n"
    assert len(server.engine.seen) >= len(STEPS) + 1
