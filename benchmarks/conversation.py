"""A 12-turn conversation over real text, with one server restart in the middle.

    python benchmarks/conversation.py [--quick] [--turns 12] [--piece-tokens 140]

Every turn hands the model the next piece of the Python standard library's sources and keeps its short
answer in the history. omlx (exact mode on and off) and mlx_lm.server hold the same conversation, in turn.
What a turn has to compute is what no earlier turn has held: the new message. All that is computed beyond that is
re-prefill, whatever the reason: a restart, a token that was sampled but never fed. The first table shows it turn by
turn: omlx may recompute 2 tokens a turn, with --exact on as with --exact off.
"""

import argparse
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import (
    Answer,
    BenchmarkError,
    Corpus,
    Message,
    Server,
    ask,
    model_folder,
    note,
    omlx_server,
    parser,
    peer_server,
    run,
)
from report import Report, Table, Target
from transformers import PreTrainedTokenizerBase

SYSTEM = "You review Python code. Answer in one short sentence."
ANSWER_TOKENS = 24
MOST_BEYOND = 2


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and answer. `new` counts the prompt tokens that this server had never seen.

    The prompt's last token is one of them: it is computed in any case, because the answer's first comes out of it.
    """

    answer: Answer
    new: int

    @property
    def known(self) -> int:
        """Leading prompt tokens that it had seen."""
        return self.answer.prompt_tokens - self.new

    @property
    def beyond(self) -> int:
        """Prompt tokens computed although their state had been computed before."""
        return max(0, self.answer.recomputed - self.new)


@dataclass
class Session:
    """One server's side of the conversation: its history, and the token ids it has states for."""

    server: Server
    corpus: Corpus
    mode: str  # of omlx; "" for another server
    messages: list[Message] = field(default_factory=lambda: [{"role": "system", "content": SYSTEM}])
    known: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    async def turn(self, piece: str) -> None:
        self.messages.append({"role": "user", "content": f"What does this do?\n\n{piece}"})
        prompt = self.corpus.chat_tokens(self.messages)
        answer = await ask(self.server, self.messages, max_tokens=ANSWER_TOKENS)
        if answer.prompt_tokens != len(prompt):
            raise BenchmarkError(f"{self.server.name} counts {answer.prompt_tokens} prompt tokens, not {len(prompt)}")
        self.turns.append(Turn(answer, len(prompt) - common_prefix(prompt[:-1], self.known)))
        self.known = prompt + self.corpus.text_tokens(answer.text) + end_token(self.corpus.tokenizer, answer)
        self.messages.append({"role": "assistant", "content": answer.text})

    def allowed(self, turn: Turn) -> int | None:
        return allowed(self.mode, turn.known)


def allowed(mode: str, known: int) -> int | None:
    """How many of `known` tokens a turn may compute again; None if nothing was promised."""
    return MOST_BEYOND if mode in ("on", "off") else None


def end_token(tokenizer: PreTrainedTokenizerBase, answer: Answer) -> list[int]:
    """The token that ended an answer was fed like the others, unless the answer was cut off."""
    end = tokenizer.eos_token_id
    return [end] if answer.finish_reason == "stop" and isinstance(end, int) else []


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens the two lists begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


async def main(args: argparse.Namespace, work: Path) -> None:
    report = Report("conversation", args)
    corpus = Corpus(model_folder(args.model))
    pieces = [corpus.prompt(args.piece_tokens) for _ in range(args.turns)]
    servers = {mode: omlx_server(args, work, name=f"omlx --exact {mode}", exact=mode) for mode in ("on", "off")}
    servers[""] = peer_server(args, work)
    report.used(*servers.values())
    async with AsyncExitStack() as stack:
        sessions = [Session(await stack.enter_async_context(server), corpus, mode) for mode, server in servers.items()]
        await converse(sessions, pieces, restart_before=args.turns // 2)
    fill(report, sessions, restart_before=args.turns // 2)
    report.finish()


async def converse(sessions: list[Session], pieces: list[str], restart_before: int) -> None:
    for number, piece in enumerate(pieces):
        for session in sessions:
            if number == restart_before:
                await session.server.restart()
            await session.turn(piece)
            last = session.turns[-1]
            note(f"turn {number + 1}, {session.server.name}: {last.answer.prompt_tokens} tokens, "
                 f"{last.answer.cached_tokens} cached, first token after {last.answer.ttft:.2f} s")  # fmt: skip


def fill(report: Report, sessions: list[Session], restart_before: int) -> None:
    _add_beyond(report, sessions, restart_before)
    totals = report.table(
        "A conversation with one restart: totals", "server", "prompt tokens", "cached", "prefilled",
        "of these seen before", "first tokens, s", "whole wait, s",
    )  # fmt: skip
    for session in sessions:
        answers = [turn.answer for turn in session.turns]
        totals.add(
            session.server.name, sum(a.prompt_tokens for a in answers), sum(a.cached_tokens for a in answers),
            sum(a.recomputed for a in answers), sum(turn.beyond for turn in session.turns),
            f"{sum(a.ttft for a in answers):.1f}", f"{sum(a.duration for a in answers):.1f}",
        )  # fmt: skip
        _add_turns(report, session, restart_before)
        report.samples[session.server.name] = [_sample(session, turn) for turn in session.turns]


def _sample(session: Session, turn: Turn) -> dict[str, Any]:
    return {
        "ttft_s": round(turn.answer.ttft, 4),
        "wait_s": round(turn.answer.duration, 4),
        "new_tokens": turn.new,
        "computed_again": turn.beyond,
        "may_be_again": session.allowed(turn),
        "prompt_tokens": turn.answer.prompt_tokens,
        "cached_tokens": turn.answer.cached_tokens,
    }


def _add_beyond(report: Report, sessions: list[Session], restart_before: int) -> None:
    """Tokens computed beyond the new ones, a row a turn and a column a server."""
    names = [session.server.name for session in sessions]
    table = report.table("Tokens computed beyond the new ones", "turn", "new tokens", *names)
    for number, turns in enumerate(zip(*(session.turns for session in sessions), strict=True)):
        name = f"{number + 1} (restarted)" if number == restart_before else number + 1
        table.add(name, " / ".join(dict.fromkeys(str(turn.new) for turn in turns)), *(turn.beyond for turn in turns))
    _add_sums(table, sessions)


def _add_sums(table: Table, sessions: list[Session]) -> None:
    sums = [sum(turn.beyond for turn in session.turns) for session in sessions]
    new = dict.fromkeys(str(sum(turn.new for turn in session.turns)) for session in sessions)
    targets = []
    for session in sessions:
        over = [turn.beyond - most for turn in session.turns if (most := session.allowed(turn)) is not None]
        if over:
            what = f"{session.server.name}, tokens over what a turn may compute again, the worst turn"
            targets.append(Target(what, max(0, *over), 0, "at most"))
    table.add("sum", " / ".join(new), *sums, targets=targets)


def _add_turns(report: Report, session: Session, restart_before: int) -> None:
    table = report.table(
        f"Turn by turn: {session.server.name}", "turn", "prompt tokens", "cached", "prefilled", "of these new",
        "of these seen before", "TTFT, s", "wait, s",
    )  # fmt: skip
    for number, turn in enumerate(session.turns):
        a = turn.answer
        name = f"{number + 1} (restarted)" if number == restart_before else number + 1
        table.add(
            name, a.prompt_tokens, a.cached_tokens, a.recomputed, turn.new, turn.beyond,
            f"{a.ttft:.2f}", f"{a.duration:.2f}",
        )  # fmt: skip


def options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--turns", type=int, default=12)
    made.add_argument("--piece-tokens", type=int, default=140, help="tokens of source text in each turn")
    args: argparse.Namespace = made.parse_args()
    if args.quick:
        args.turns, args.piece_tokens = 4, 40
    return args


if __name__ == "__main__":
    run(main, options())
