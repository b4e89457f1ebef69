"""A coding agent at work in both dialects, 15 turns with one server restart in the middle.

    python benchmarks/agent_session.py [--quick] [--turns 15]

The agent (scripted_agent.py) reads, edits and runs real files as the model's calls say, and sends back what the model
answered. One server with --exact on and one with off each serve two agents in turn, one in each dialect.

What a turn has to compute is what lies behind the last prompt and answer: the new message. All that is computed beyond
that is re-prefill, whatever the reason: a restart, the grid of exact mode, a token that was sampled but never fed, a
call that reads as other tokens than it was sampled in. omlx may recompute 2 tokens a turn with --exact off, and with
--exact on what lies behind the last edge of the grid.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
from common import BenchmarkError, Server, note, omlx_server, parser, run
from conversation import allowed
from report import Report, Target
from scripted_agent import (
    ALL_PASSED,
    PLAN,
    AgentError,
    AgentSession,
    AgentTurn,
    AnthropicDialect,
    OpenAIDialect,
    Workspace,
    steps,
)


async def main(args: argparse.Namespace, work: Path) -> None:
    """Both dialects on each server, turn by turn; a salt keeps their caches apart, for their prompts are the same."""
    report = Report("agent_session", args)
    for mode in ("on", "off"):
        server = omlx_server(args, work, name=f"omlx --exact {mode}", exact=mode)
        report.used(server)
        sessions = [
            AgentSession(dialect, Workspace.made(work / f"{mode}-{dialect.name}"), server.model, dialect.name)
            for dialect in (OpenAIDialect(), AnthropicDialect())
        ]
        async with server:
            await act(server, sessions, args.turns)
        _check(sessions, args.turns)
        _add_agents(report, mode, sessions, args.turns // 2)
    report.finish()


async def act(server: Server, sessions: list[AgentSession], turns: int) -> None:
    for number, tool in enumerate(steps(turns)):
        if number == turns // 2:
            await server.restart()
        async with httpx.AsyncClient(base_url=server.url, timeout=httpx.Timeout(900.0, connect=10.0)) as client:
            for session in sessions:
                turn = await _turn(session, client, tool)
                note(f"turn {number + 1}, {server.name}, {session.dialect.name}: {tool or 'writes'}, "
                     f"{turn.reply.prompt_tokens} tokens, {turn.computed} computed, {turn.beyond} again")  # fmt: skip


async def _turn(session: AgentSession, client: httpx.AsyncClient, tool: str | None) -> AgentTurn:
    try:
        return await session.turn(client, tool)
    except AgentError as error:
        raise BenchmarkError(str(error)) from error


def _check(sessions: list[AgentSession], turns: int) -> None:
    """The work was really done, and the dialects are two ways to say the same."""
    one, other = sessions
    if one.results != other.results:
        raise BenchmarkError(f"the dialects' tools found different things: {one.results} and {other.results}")
    if turns == len(PLAN) + 1 and ALL_PASSED not in one.results[-1]:
        raise BenchmarkError(f"the tests do not pass: {one.results[-1]}")


def _add_agents(report: Report, mode: str, sessions: list[AgentSession], restart_before: int) -> None:
    names = [session.dialect.name for session in sessions]
    columns = [f"{name}: {what}" for name in names for what in ("prefilled", "again", "TTFT, s")]
    table = report.table(f"An agent in both dialects, --exact {mode}", "turn", "call", "prompt tokens", "new", *columns)
    for number, turns in enumerate(zip(*(session.turns for session in sessions), strict=True)):
        name = f"{number + 1} (restarted)" if number == restart_before else number + 1
        table.add(
            name, turns[0].tool or "-", _same(turn.reply.prompt_tokens for turn in turns), _same(t.new for t in turns),
            *(cell for turn in turns for cell in (turn.computed, turn.beyond, f"{turn.ttft:.2f}")),
        )  # fmt: skip
    sums = [(sum(turn.computed for turn in s.turns), sum(turn.beyond for turn in s.turns)) for s in sessions]
    targets = [
        Target(f"{session.dialect.name}, tokens over what a turn may compute again, the worst turn",
               max(0, *(turn.beyond - (allowed(mode, turn.known) or 0) for turn in session.turns)), 0, "at most")
        for session in sessions
    ]  # fmt: skip
    prompts = _same(sum(turn.reply.prompt_tokens for turn in session.turns) for session in sessions)
    new = _same(sum(turn.new for turn in session.turns) for session in sessions)
    table.add("sum", "", prompts, new, *(cell for pair in sums for cell in (*pair, "")), targets=targets)
    for session in sessions:
        name = f"{session.dialect.name}, --exact {mode}"
        report.samples[name] = [_sample(mode, turn) for turn in session.turns]


def _same(values: Iterable[int]) -> str:
    """One figure where all agree."""
    return " / ".join(dict.fromkeys(map(str, values)))


def _sample(mode: str, turn: AgentTurn) -> dict[str, Any]:
    reply = turn.reply
    return {
        "call": turn.tool,
        "ttft_s": round(turn.ttft, 4),
        "wait_s": round(reply.ended - reply.sent, 4),
        "new_tokens": turn.new,
        "computed_again": turn.beyond,
        "may_be_again": allowed(mode, turn.known),
        "prompt_tokens": reply.prompt_tokens,
        "cached_tokens": reply.cached_tokens,
        "completion_tokens": reply.completion_tokens,
    }


def options() -> argparse.Namespace:
    made = parser(__doc__)
    most = len(PLAN) + 1
    made.add_argument("--turns", type=int, default=most, choices=range(4, most + 1), metavar=f"4-{most}")
    args: argparse.Namespace = made.parse_args()
    if args.quick:
        args.turns = 4
    return args


if __name__ == "__main__":
    run(main, options())
