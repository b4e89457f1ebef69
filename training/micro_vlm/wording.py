"""The words of the conversations: questions in several wordings, answers, and text that is about neither."""

from pathlib import Path
from random import Random

NO_PICTURE = "there is no picture"

# Questions about one picture. {thing}: "shape", "circle", "digit"; {things}: "shapes", "circles"; {it}: "it" or "the
# shape"; {picture}: "the picture", "the second picture"; {in}: "", " in the picture", " in the second picture";
# {there}: the same, but never empty.
QUESTIONS: dict[str, tuple[str, ...]] = {
    "colour": (
        "What {colour} is the {thing}{in}?",
        "What {colour} is {it}{in}?",
        "Which {colour} does the {thing}{in} have?",
        "Name the {colour} of the {thing}{in}.",
        "What is the {colour} of the {thing}{in}?",
        "What is the {colour}{in}?",
    ),
    "colour of all": (
        "What {colour} is {picture}?",
        "What is the {colour} of {picture}?",
        "Which {colour} is {picture}?",
        "Which {colour} do you see{there}?",
        "Name the {colour} of {picture}.",
        "What {colour} does {picture} show?",
        "What {colour}?",
    ),
    "colour of several": (
        "What {colour} are the shapes{in}?",
        "Which {colour} do the shapes{in} have?",
        "What {colour} do you see{there}?",
    ),
    "shape": (
        "What shape is {it}{in}?",
        "Which shape is it{in}?",
        "Which shape do you see{there}?",
        "What shape is{there}?",
        "What shape does {picture} show?",
        "Name the shape{in}.",
    ),
    "count": (
        "How many {things} are{there}?",
        "How many {things} do you see{there}?",
        "Count the {things}{in}.",
        "How many {things} does {picture} show?",
        "What is the number of {things}{in}?",
    ),
    "position": (
        "Where is the {thing}{in}?",
        "Where is {it}{in}?",
        "In which part of {picture} is the {thing}?",
        "What is the position of the {thing}{in}?",
        "On which side is the {thing}{in}?",
    ),
    "digit": (
        "Which digit is{there}?",
        "What digit is it{in}?",
        "Which digit do you see{there}?",
        "Read the digit{in}.",
        "Which number is{there}?",
        "What number does {picture} show?",
    ),
}
# Questions about two pictures; {both}: "both pictures", "the two pictures".
COMPARISONS: dict[str, tuple[str, ...]] = {
    "same colour": (
        "Do {both} show the same {colour}?",
        "Do {both} have the same {colour}?",
        "Is the {colour} the same in {both}?",
        "Are {both} of the same {colour}?",
    ),
    "same shape": (
        "Do {both} show the same shape?",
        "Do {both} have the same shape?",
        "Is the shape the same in {both}?",
    ),
}
TALK: tuple[tuple[str, str], ...] = (
    ("Hello!", "hello"),
    ("Hello", "hello"),
    ("Hi", "hello"),
    ("Hi there!", "hello"),
    ("Good morning.", "hello"),
)
SYSTEM: tuple[str, ...] = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "Answer with one word.",
    "You answer questions about pictures.",
    "You are micro-vlm. Answer in as few words as possible.",
    "Be short and exact.",
)
ORDINALS = ("first", "second", "third")
WORDS = tuple(Path(__file__).with_name("words.txt").read_text().split())
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def word(rng: Random) -> str:
    """A word: one of ours, a made-up one, or one with a number."""
    kind = rng.random()
    if kind < 0.8:
        return rng.choice(WORDS)
    if kind < 0.9:
        return "".join(rng.choice(_LETTERS) for _ in range(rng.randint(2, 8)))
    if kind < 0.95:
        return f"{rng.choice(WORDS)}{rng.randrange(1000)}"
    return rng.choice(("red", "green", "blue", "yellow", "circle", "square", "left", "picture", "digit", "shape"))


def sentence(rng: Random) -> str:
    """Some words that end with a full stop."""
    words = [word(rng) for _ in range(rng.randint(3, 12))]
    return " ".join(words).capitalize() + rng.choice((".", ".", ".", "!", ":", ","))


def filler(rng: Random, length: int) -> str:
    """About `length` words of text that asks nothing. Sometimes one sentence again and again."""
    if rng.random() < 0.25:
        unit = sentence(rng)
        return " ".join([unit] * max(1, length // len(unit.split())))
    if rng.random() < 0.15:
        name = rng.choice(("word", "item", "line", "x", "section"))
        return " ".join(f"{name} {i}." if rng.random() < 0.5 else f"{name}{i}" for i in range(max(1, length // 2)))
    parts: list[str] = []
    while sum(len(part.split()) for part in parts) < length:
        parts.append(sentence(rng))
    return rng.choice((" ", " ", " ", "\n")).join(parts)
