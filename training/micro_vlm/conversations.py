"""Conversations about pictures: who says what, which pictures are in it, and the one right answer of each turn."""

from random import Random
from typing import NamedTuple

from training.micro_vlm import pictures, wording
from training.micro_vlm.pictures import Scene

Part = dict[str, str]
Message = dict[str, str | list[Part]]


class Turn(NamedTuple):
    """A question with the pictures it brings, its one right answer, and what it tests."""

    scenes: tuple[Scene, ...]
    parts: tuple[Part, ...]  # {"type": "image"} or {"type": "text", "text": ...}
    answer: str
    task: str


class Conversation(NamedTuple):
    """One example. `system` may be empty."""

    system: str
    turns: tuple[Turn, ...]

    @property
    def scenes(self) -> list[Scene]:
        """The pictures in the order in which they appear."""
        return [scene for turn in self.turns for scene in turn.scenes]

    def messages(self) -> list[Message]:
        """The conversation for a chat template, answers included."""
        made: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            only_text = len(turn.parts) == 1 and turn.parts[0]["type"] == "text"
            made.append({"role": "user", "content": turn.parts[0]["text"] if only_text else list(turn.parts)})
            made.append({"role": "assistant", "content": turn.answer})
        return made


class Question(NamedTuple):
    """What is asked, its answer, and what it tests."""

    text: str
    answer: str
    task: str


# Shares of conversations: first steps, with two pictures, without any, with text around questions, with a lot of it.
_FIRST_SHARE, _TWO_SHARE, _TALK_SHARE, _TEXT_SHARE, _LONG_SHARE = 0.3, 0.5, 0.06, 0.25, 0.02

_LEARNT_LAST = ("count", "position", "shape", "same shape")

# How many pictures come with each turn. Those of one conversation come together: a model as small as this takes too
# long to learn which one is meant when they come one by one.
_ONE = ((1, 0), (1, 0, 0), (1, 0, 0, 0))
_TWO = ((2, 0), (2, 0, 0), (2, 0, 0, 0))


def first_steps(rng: Random) -> Conversation:
    """Two or three pictures at once, and which colour each is.

    Which picture is meant is learnt fast when nothing else is asked, and hardly where the question tells them apart.
    """
    scenes = [rng.choice((pictures.solid, pictures.single))(rng) for _ in range(rng.choice((2, 2, 3)))]
    turns: list[Turn] = []
    for new in (len(scenes), 0, 0, 0):
        target = rng.randrange(len(scenes))
        question = about(rng, scenes[target], wording.ORDINALS[target])[0]
        parts = (*[{"type": "image"}] * new, _words(question.text))
        turns.append(Turn(tuple(scenes[:new]), parts, question.answer, question.task))
    return Conversation("", tuple(turns))


def conversation(rng: Random) -> Conversation:
    """A conversation of one to four turns."""
    if rng.random() < _FIRST_SHARE:
        return first_steps(rng)
    text = _Text(rng)
    if rng.random() < _TALK_SHARE:
        return Conversation(text.system(), tuple(_talk(rng, text) for _ in range(rng.randint(1, 3))))
    plan = rng.choice(_TWO if rng.random() < _TWO_SHARE else _ONE)
    if rng.random() < _TALK_SHARE:
        plan = (0, *plan[:3])
    scenes = related_scenes(rng, sum(plan))
    turns: list[Turn] = []
    seen = 0
    for count in plan:
        seen += count
        asked = [turn.parts[-1].get("text", "") for turn in turns]
        turns.append(_turn(rng, scenes[:seen], count, text, asked))
    return Conversation(text.system(), tuple(turns))


def last_steps(rng: Random) -> Conversation:
    """A conversation that mostly asks for something of what takes longest to be learnt."""
    while True:
        made = conversation(rng)
        if rng.random() < 0.12 or any(turn.task in _LEARNT_LAST for turn in made.turns):
            return made


class _Text:
    """The text around the questions of one conversation."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._long = rng.random() < _LONG_SHARE
        self._some = self._long or rng.random() < _TEXT_SHARE

    def system(self) -> str:
        """The system prompt, mostly empty."""
        if not self._some or self._rng.random() < 0.4:
            return ""
        known = self._rng.choice(wording.SYSTEM)
        kind = self._rng.random()
        return known if kind < 0.5 else self._filler() if kind < 0.75 else f"{known} {self._filler()}"

    def before(self) -> str:
        """Text that goes before a picture or a question, mostly empty."""
        if not self._some or self._rng.random() < 0.6:
            return ""
        return self._filler() + self._rng.choice((" ", " ", "\n", "\n\n"))

    def _filler(self) -> str:
        if self._long:
            self._long = self._rng.random() < 0.3
            return wording.filler(self._rng, self._rng.randint(40, 260))
        return wording.filler(self._rng, self._rng.randint(1, 25))


def related_scenes(rng: Random, count: int) -> list[Scene]:
    """Pictures; of several, many have something in common with the one before."""
    if count == 1 or rng.random() < 0.3:
        return [any_scene(rng) for _ in range(count)]
    scenes = [rng.choice((pictures.solid, pictures.single, pictures.single, pictures.group))(rng)]
    while len(scenes) < count:
        scenes.append(_like(rng, scenes[-1]))
    return scenes


def any_scene(rng: Random) -> Scene:
    """A picture of any sort. Counting and reading are harder than the rest, and come more often."""
    sorts = (pictures.solid, pictures.single, pictures.group, pictures.digit)
    return rng.choices(sorts, weights=(1, 3, 3, 3))[0](rng)


def _like(rng: Random, scene: Scene) -> Scene:
    """A picture to compare with `scene`."""
    if rng.random() < 0.06:
        return scene
    if len(scene.things) > 1:
        return pictures.group(rng) if rng.random() < 0.8 else pictures.single(rng)
    colour = scene.colour if rng.random() < 0.45 else None
    if scene.solid and rng.random() < 0.75:
        return pictures.solid(rng, colour)
    return pictures.single(rng, scene.shape if rng.random() < 0.45 else None, colour)


def _talk(rng: Random, text: _Text) -> Turn:
    """A turn of a conversation without pictures."""
    if rng.random() < 0.35:
        asked, answer = rng.choice(wording.TALK)
        return _text_turn(asked, answer, "talk")
    question = rng.choice(about(rng, any_scene(rng), rng.choice(("", "", "first"))))
    return _text_turn(text.before() + question.text, wording.NO_PICTURE, "no picture")


def _text_turn(text: str, answer: str, task: str) -> Turn:
    return Turn((), ({"type": "text", "text": text},), answer, task)


def _turn(rng: Random, seen: list[Scene], new: int, text: _Text, asked: list[str]) -> Turn:
    """A turn that brings the last `new` of the pictures `seen` so far; mostly not a question that was asked before."""
    if not seen:
        return _talk(rng, text)
    question = ask(rng, seen)
    if any(question.text in before for before in asked):
        question = ask(rng, seen)
    words = _spoken(rng, question.text)
    return Turn(tuple(seen[len(seen) - new :]), _parts(rng, new, words, text), question.answer, question.task)


def _parts(rng: Random, new: int, question: str, text: _Text) -> tuple[Part, ...]:
    """The pictures and the question, in one of the orders that people use."""
    images: list[Part] = [{"type": "image"}] * new
    if new and rng.random() < 0.2:
        return (_words(text.before() + question), *images)
    before = text.before() if new else ""
    return (*([_words(before)] if before else []), *images, _words(text.before() + question))


def _words(text: str) -> Part:
    return {"type": "text", "text": text}


def _spoken(rng: Random, question: str) -> str:
    """The question as somebody might type it."""
    kind = rng.random()
    if kind < 0.05:
        return question.lower()
    if kind < 0.1:
        return question.rstrip("?.")
    return f"{question} Answer in one word." if kind < 0.15 else question


def ask(rng: Random, seen: list[Scene]) -> Question:
    """A question about one of the pictures, or about two."""
    if len(seen) == 2 and rng.random() < 0.5:
        comparisons = compared(rng, *seen)
        if comparisons:
            return rng.choice(comparisons)
    target = rng.randrange(len(seen))
    which = wording.ORDINALS[target] if len(seen) > 1 or rng.random() < 0.2 else ""
    return rng.choice(about(rng, seen[target], which))


def about(rng: Random, scene: Scene, which: str) -> list[Question]:
    """Questions about one picture, some of each sort; `which` is "first", "second", ... or "" for the one just seen."""
    if scene.is_digit:
        thing = scene.things[0]
        facts = [("digit", thing.kind, "digit")] * 3 + [("colour", thing.colour, "digit")]
    elif scene.solid:
        facts = [("colour of all", scene.solid, "picture")]
    elif len(scene.things) == 1:
        facts = _single_facts(rng, scene)
    else:
        facts = _group_facts(rng, scene)
    return [_question(rng, sort, answer, thing, which) for sort, answer, thing in facts]


def _single_facts(rng: Random, scene: Scene) -> list[tuple[str, str, str]]:
    """(sort of question, answer, what the thing is called)."""
    thing = scene.things[0]
    name = rng.choice(("shape", thing.kind))
    colour = rng.choice(("colour", "colour of all"))
    facts = [(colour, thing.colour, name), ("count", "1", "shape"), *[("shape", thing.kind, "shape")] * 2]
    return facts + [("position", thing.place, name)] * 2 if thing.place else facts


def _group_facts(rng: Random, scene: Scene) -> list[tuple[str, str, str]]:
    name = rng.choice(("shape", scene.shape or "shape"))
    facts = [("count", str(len(scene.things)), name)] * 2
    facts += [("colour of several", scene.colour, "shape")] if scene.colour else []
    return facts + [("shape", scene.shape, "shape")] if scene.shape else facts


def _question(rng: Random, sort: str, answer: str, thing: str, which: str) -> Question:
    picture = f"the {which} picture" if which else rng.choice(("the picture", "the picture", "this picture", "it"))
    inside = f" in {picture}" if which else rng.choice(("", f" in {picture}"))
    text = rng.choice([text for text in wording.QUESTIONS[sort] if not which or _names_picture(text)])
    known = {"{thing}": thing, "{it}": f"the {thing}" if which else "it", "{picture}": picture}
    known["{things}"] = f"{thing}es" if thing.endswith("s") else f"{thing}s"
    known |= {"{in}": inside, "{there}": inside or rng.choice((" there", f" in {picture}")), "{colour}": _colour(rng)}
    for name, value in known.items():
        text = text.replace(name, value)
    return Question(text, answer, f"{sort.split()[0]}")


def _names_picture(text: str) -> bool:
    return any(name in text for name in ("{in}", "{there}", "{picture}"))


def _colour(rng: Random) -> str:
    return rng.choice(("colour", "colour", "color"))


def compared(rng: Random, a: Scene, b: Scene) -> list[Question]:
    """The questions that can be asked about two pictures, one of each sort."""
    facts: list[tuple[str, str]] = []
    if a.colour and b.colour:
        facts.append(("same colour", "yes" if a.colour == b.colour else "no"))
    if a.shape and b.shape and len(a.things) == len(b.things) == 1:
        facts.append(("same shape", "yes" if a.shape == b.shape else "no"))
    return [_comparison(rng, sort, answer) for sort, answer in facts]


def _comparison(rng: Random, sort: str, answer: str) -> Question:
    text = rng.choice(wording.COMPARISONS[sort]).replace("{both}", rng.choice(("both pictures", "the two pictures")))
    return Question(text.replace("{colour}", _colour(rng)), answer, sort)
