"""Pictures at work: three questions about one picture, asked twice, with a restart between.

Starts `omlx serve` on micro-vlm, the small vision model that omlx brings along, and prints for each question how often
the vision encoder ran, how many of the prompt's tokens came from the cache, and the time to the first token. Exits
non-zero, with a line that says why, when one of these is not as it should be.
"""

import base64
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo import Answer, DemoError, Server, ask, console, perform, running_server, seconds
from PIL import Image, ImageDraw
from rich.table import Column, Table

MODEL = "micro-vlm"
SHAPE, COLOUR = "square", "red"
# What a right answer has to contain.
QUESTIONS = (
    ("What colour is the shape?", COLOUR),
    ("Which shape do you see?", SHAPE),
    ("How many shapes are there?", "1"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One question: what came of it, and how often the encoder ran for it."""

    when: str
    question: str
    answer: Answer
    encoder_calls: int


def main() -> int:
    return perform(play)


def play(folder: Path) -> None:
    picture = data_url(draw())
    rows = []
    for when in ("first", "after a restart"):
        with running_server(folder, MODEL) as server:
            rows += [ask_about(server, picture, when, question) for question, _ in QUESTIONS]
    check(rows)
    show(rows)


def draw() -> Image.Image:
    """A red square on white."""
    picture = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(picture).rectangle((20, 20, 43, 43), fill=(220, 30, 30))
    return picture


def data_url(picture: Image.Image) -> str:
    png = io.BytesIO()
    picture.save(png, "PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()


def ask_about(server: Server, picture: str, when: str, question: str) -> Row:
    before = encoder_calls(server)
    answer = ask(server, f"{when}: {question}", body(picture, question))
    return Row(when, question, answer, encoder_calls(server) - before)


def body(picture: str, question: str) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": question}]
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 16,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def encoder_calls(server: Server) -> int:
    """How often the encoder ran since the server's start."""
    with server.client() as client:
        return int(client.get("/admin/cache_probe").json()["total"]["vision_encoder_calls"])


def check(rows: list[Row]) -> None:
    """The encoder runs once for the picture, whatever is asked; answers follow the picture and do not change."""
    first, again = rows[: len(QUESTIONS)], rows[len(QUESTIONS) :]
    calls = [row.encoder_calls for row in rows]
    if calls != [1] + [0] * (len(rows) - 1):
        raise DemoError(f"the encoder should run for the first question alone; it ran {calls} times")
    for row, (_, expected) in zip(first, QUESTIONS, strict=True):
        if expected not in row.answer.text:
            raise DemoError(f"{row.question} was answered {row.answer.text!r} instead of {expected!r}")
    for row, before in zip(again, first, strict=True):
        if row.answer.text != before.answer.text:
            raise DemoError(f"{row.question} was answered {row.answer.text!r}, before {before.answer.text!r}")
        if row.answer.cached_tokens != row.answer.prompt_tokens - 1:
            raise DemoError(f"after a restart {row.answer.cached_tokens} tokens of {row.question} were cached")


def show(rows: list[Row]) -> None:
    right = ("encoder calls", "prompt tokens", "cached tokens", "time to first token")
    table = Table("", "question", "answer", *(Column(title, justify="right") for title in right))
    for row in rows:
        tokens = (f"{row.answer.prompt_tokens:,}", f"{row.answer.cached_tokens:,}")
        answer = (row.answer.text.strip(), str(row.encoder_calls))
        table.add_row(row.when, row.question, *answer, *tokens, seconds(row.answer.ttft_s))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
