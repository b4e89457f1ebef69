"""A conversation through its chat template: what each turn computes beyond what is new to the server."""

import random
from pathlib import Path
from typing import Any

import pytest

from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.model import loader
from omlx.model.runner import TextRunner
from tests.dict_store import DictStore
from tests.test_scheduler import close
from tests.tiny import Bench

TURNS = 12
# The tiny model's format, but the first 12 characters of an answer count as reasoning, which is not repeated.
DROPS_REASONING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'][12:] if message['role'] == 'assistant' else message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def loaded(tiny_model_dir: Path) -> Any:
    return loader.load(tiny_model_dir)


@pytest.fixture(scope="module")
def runner(loaded: Any) -> TextRunner:
    return TextRunner(loaded)


class Talk:
    """One conversation: its messages, and the token ids that the server has had states for."""

    def __init__(self, bench: Bench, tokenizer: Any, **template: Any) -> None:
        self.bench, self.tokenizer, self.template = bench, tokenizer, template
        self.messages = [{"role": "system", "content": "You answer briefly and well."}]
        self.held: list[int] = []

    def prompt(self) -> list[int]:
        return list(
            self.tokenizer.apply_chat_template(
                self.messages, add_generation_prompt=True, tokenize=True, return_dict=False, **self.template
            )
        )

    def say(self, text: str, **sampling: Any) -> tuple[int, int]:
        """Asks and takes the answer into the history; how many tokens were known, and how many of them were reused.

        The prompt's last token is always computed, so it counts as new.
        """
        self.messages.append({"role": "user", "content": text})
        prompt = self.prompt()
        request = self.bench.ask(prompt, **sampling)
        known = common(prompt[:-1], self.held)
        tokens = self.bench.tokens(request)
        self.held = prompt + tokens
        self.messages.append({"role": "assistant", "content": self.tokenizer.decode(tokens, skip_special_tokens=True)})
        return known, request.stats.cached_tokens


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def words(rng: random.Random) -> str:
    return " ".join(rng.choice(["how", "many", "words", "are", "there", "here"]) for _ in range(rng.randrange(1, 30)))


@pytest.mark.parametrize("tiers", ["ram", "ssd"])
@pytest.mark.parametrize("exact", ["on", "off"])
@pytest.mark.parametrize("ends", ["length", "stop"])
def test_a_turn_computes_what_is_new_and_no_more_than_its_mode_allows(loaded, runner, tmp_path, ends, exact, tiers):
    store = PagedSSDCacheManager(tmp_path, 1 << 30, 0) if tiers == "ssd" else DictStore()
    talk = Talk(Bench(runner, store, exact=exact, block_size=64), loaded.tokenizer)
    rng = random.Random(0)
    for turn in range(TURNS):
        sampling = {"max_tokens": rng.randrange(1, 40)}
        if ends == "stop":
            sampling |= {"logit_bias": ((258, 6.5),), "max_tokens": 200, "temperature": 1.0, "seed": turn}
        known, reused = talk.say(words(rng), **sampling)
        assert reused == known
        assert known > 0 or not turn
        if tiers == "ssd":
            store.flush(60)
    if ends == "stop":
        reasons = [outputs[-1].finish_reason for outputs in talk.bench.outputs.values()]
        assert reasons.count("stop") >= TURNS // 2
    store.close()


def test_the_end_of_an_answer_is_stored_with_its_end_token(loaded, runner):
    """ChatML writes the end token and a newline after an answer: only the newline is new."""
    bench = Bench(runner, DictStore(), exact="off", block_size=64)
    talk = Talk(bench, loaded.tokenizer)
    talk.say("hello", logit_bias=((258, 6.5),), max_tokens=200, temperature=1.0, seed=1)
    assert talk.held[-1] == 258
    talk.messages.append({"role": "user", "content": "and?"})
    prompt = talk.prompt()
    assert prompt[: len(talk.held)] == talk.held
    assert bench.ask(prompt).stats.cached_tokens == len(talk.held)


@pytest.mark.parametrize("exact", ["on", "strict", "off"])
@pytest.mark.parametrize("asked", [3, 40, 150])
def test_what_precedes_dropped_reasoning_is_reused(loaded, runner, exact, asked):
    bench = Bench(runner, DictStore(), exact=exact, block_size=64)
    talk = Talk(bench, loaded.tokenizer, chat_template=DROPS_REASONING)
    before: list[int] = []
    for turn in range(4):
        talk.messages.append({"role": "user", "content": "x" * asked + str(turn)})
        prompt = talk.prompt()
        request = bench.ask(prompt, max_tokens=30, ignore_eos=True)
        shared = common(prompt, before)
        assert shared >= len(before)
        assert request.stats.cached_tokens >= (shared if exact == "off" else max(shared - 1, 0))
        fresh = Bench(runner, DictStore(), exact=exact, block_size=64)
        alone = fresh.answer(fresh.ask(prompt, cache=False, max_tokens=30, ignore_eos=True))
        assert close(bench.answer(request), alone, 1e-3)
        assert exact == "off" or bench.answer(request) == alone  # no decoded state is in it
        text = loaded.tokenizer.decode(bench.tokens(request))
        talk.messages.append({"role": "assistant", "content": text})
        assert len(text) > 12 and text[:12] not in loaded.tokenizer.decode(talk.prompt()[len(prompt) :])
        before = prompt
