"""The part `model` of vision.py: questions about pictures, each beside a question about as much text.

The model is of SmolVLM's size and random: a SigLIP-base encoder (tiles of 512 pixels, 86M weights) in front of the
starter model's text part, with its tokenizer. What a question costs does not depend on what the weights say.
"""

import argparse
import base64
import io
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import mlx.core as mx
import numpy as np
from common import Answer, BenchmarkError, Corpus, Message, Server, ask, model_folder, note, omlx_server
from mlx.utils import tree_flatten, tree_map
from PIL import Image
from report import Report, Spread, Table, Target

from omlx.testing import make_tiny_vlm

TILE = 512  # pixels a side
QUICK_SIZE = (64, 48)  # of a picture for the tiny model
RNG = np.random.default_rng(0)
MOST_RATIO = 1.5
COLUMNS = (
    "question", "prompt tokens", "cached", "encoder calls", "features reused", "TTFT picture", "min to max",
    "TTFT text", "min to max", "runs", "picture / text", "of CPU time",
)  # fmt: skip
FIRST = "first about a picture"
SECOND = "second, from RAM"
OTHER_WORDS = "other words before it, from RAM"
SECOND_SSD = "second, after a restart"
OTHER_WORDS_SSD = "other words before it, after a restart"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# ---- the model


def make_model(folder: Path, starter: Path, tiles: int) -> Path:
    """Writes a model with random weights, half precision, 0.5 GB. It sees pictures as so many tiles a side."""
    folder.mkdir()
    added = _write_tokenizer(folder, starter, tiles)
    text = json.loads((starter / "config.json").read_text())
    vocabulary = -(-(max(added.values()) + 1) // 64) * 64
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    shared = (*sizes, "rms_norm_eps", "rope_theta", "max_position_embeddings")
    config = {
        "model_type": "idefics3", "image_token_id": added["<image>"], "scale_factor": 4, "vocab_size": vocabulary,
        "eos_token_id": text["eos_token_id"], "bos_token_id": text["bos_token_id"],
        "text_config": {"model_type": "llama", "vocab_size": vocabulary, **{key: text[key] for key in shared}},
        "vision_config": {
            "model_type": "idefics3_vision", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
            "num_attention_heads": 12, "image_size": TILE, "patch_size": 16,
        },
    }  # fmt: skip
    pictures = {
        "image_processor_type": "Idefics3ImageProcessor", "do_image_splitting": True,
        "size": {"longest_edge": tiles * TILE}, "max_image_size": {"longest_edge": TILE},
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }  # fmt: skip
    for name, content in (("config", config), ("preprocessor_config", pictures)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    _write_weights(folder)
    return folder


def _write_tokenizer(folder: Path, starter: Path, tiles: int) -> dict[str, int]:
    """The starter's with the tokens that go round a picture; their ids."""
    tokenizer = json.loads((starter / "tokenizer.json").read_text())
    settings = json.loads((starter / "tokenizer_config.json").read_text())
    first = max(tokenizer["model"]["vocab"].values()) + 1
    places = [f"<row_{row + 1}_col_{column + 1}>" for row in range(tiles) for column in range(tiles)]
    names = ("<image>", "<fake_token_around_image>", "<global-img>", *places)
    added = {name: first + at for at, name in enumerate(names)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": token, "content": name, **flags} for name, token in added.items()]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return added


def _write_weights(folder: Path) -> None:
    utils = import_module("mlx_vlm.utils")
    config = utils.load_config(folder)
    module, _ = utils.get_model_and_args(config)
    settings = module.ModelConfig.from_dict(config)
    settings = utils.update_module_configs(settings, module, config, ["text", "vision"])
    drawn = tree_map(_random, module.Model(settings).parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(drawn)), {"format": "mlx"})


def _random(parameter: mx.array) -> mx.array:
    """Matrices are drawn by numpy, which is faster; vectors are as the model made them."""
    if parameter.ndim < 2:
        return parameter.astype(mx.float16)
    spread = np.float32(parameter.size // parameter.shape[0]) ** -0.5
    return mx.array(RNG.standard_normal(parameter.shape, np.float32) * spread).astype(mx.float16)


# ---- questions

Shown = str | dict[str, Any]  # a text, or the part of a message that is a picture


def picture(number: int, size: tuple[int, int]) -> dict[str, Any]:
    """An image part: soft shapes under some grain, about as hard for PNG as a photo; others for other numbers."""
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, (9, 12, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
    pixels = np.asarray(coarse, np.int16) + rng.integers(-6, 7, (size[1], size[0], 3), np.int16)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def question(shown: Shown, number: int, before: str = "") -> list[Message]:
    """What is in the picture (or the text that stands for it), asked with other words for every number."""
    asked = f"\n{number:03d} What is to be seen here, where is it, and how many of it are there?"
    if isinstance(shown, str):
        return [{"role": "user", "content": before + shown + asked}]
    parts = [{"type": "text", "text": text} for text in (before, asked)]
    return [{"role": "user", "content": [parts[0], shown, parts[1]] if before else [shown, parts[1]]}]


class Pair(NamedTuple):
    """A picture, and a text of as many tokens."""

    picture: dict[str, Any]
    text: str


@dataclass
class Case:
    """Answers to one kind of question, about pictures and about texts in turn, and what the pictures needed."""

    picture: list[Answer] = field(default_factory=list)
    text: list[Answer] = field(default_factory=list)
    cpu: list[tuple[float, float]] = field(default_factory=list)
    encoded: list[int] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Median over the pairs, each measured at nearly the same time."""
        return Spread.of([a.ttft / b.ttft for a, b in zip(self.picture, self.text, strict=True)]).median

    @property
    def cpu_ratio(self) -> float:
        """The same of the server's CPU time, which other work on the machine changes less."""
        return Spread.of([picture / max(text, 0.01) for picture, text in self.cpu]).median


class Bench:
    """A server with the model, and what was measured. No question is asked twice."""

    def __init__(self, server: Server, corpus: Corpus, size: tuple[int, int]) -> None:
        self.cases: dict[str, Case] = defaultdict(Case)
        self._server = server
        self._corpus = corpus
        self._size = size
        self._pictures = count()
        self._numbers = count()

    async def pair(self) -> Pair:
        """A picture that nobody has seen."""
        shown = picture(next(self._pictures), self._size)
        wanted, single = await self._tokens(shown), await self._tokens("x")
        for _ in range(50):  # a text's ends may grow together with what is around it
            text = self._corpus.prompt(wanted - single + 1)
            if await self._tokens(text) == wanted:
                return Pair(shown, text)
        raise BenchmarkError(f"found no text of as many tokens as a picture has ({wanted})")

    async def _tokens(self, shown: Shown) -> int:
        """Of a question about it; nothing is computed."""
        body = {"model": self._server.model, "messages": question(shown, 0)}
        async with httpx.AsyncClient(timeout=60.0) as client:
            reply = await client.post(f"{self._server.url}/admin/cache_probe", json=body)
        return int(reply.raise_for_status().json()["tokens"])

    async def measure(self, name: str, pair: Pair, *, other_words: bool = False) -> None:
        """A question about each; which of them comes first changes every time."""
        number, case = next(self._numbers), self.cases[name]
        before = f"{number:03d} Look at this with care.\n" if other_words else ""
        cpu = {}
        for shown in reversed(pair) if len(case.text) % 2 else pair:
            asked, started = question(shown, number, before), self._cpu_s()
            if isinstance(shown, str):
                case.text.append(await ask(self._server, asked, max_tokens=1))
            else:
                case.picture.append(await self._see(case, asked))
            cpu[type(shown)] = self._cpu_s() - started
        case.cpu.append((cpu[dict], cpu[str]))
        seen, read = case.picture[-1], case.text[-1]
        if (seen.prompt_tokens, seen.cached_tokens) != (read.prompt_tokens, read.cached_tokens):
            raise BenchmarkError(
                f"{name}: {seen.prompt_tokens} tokens and {seen.cached_tokens} cached with the picture, "
                f"{read.prompt_tokens} and {read.cached_tokens} with the text"
            )
        cached = f"{seen.cached_tokens} of {seen.prompt_tokens} cached"
        note(f"{name}: picture {seen.ttft:.3f} s, text {read.ttft:.3f} s, {cached}")

    def _cpu_s(self) -> float:
        return sum(self._server.process.cpu_times()[:2])

    async def _see(self, case: Case, messages: list[Message]) -> Answer:
        before = await self._server.probe()
        answer = await ask(self._server, messages, max_tokens=1)
        after = await self._server.probe()
        for found, figure in ((case.encoded, "vision_encoder_calls"), (case.reused, "vision_feature_hits")):
            found.append(after[figure] - before[figure])
        return answer


# ---- the part


async def model(report: Report, args: argparse.Namespace, work: Path) -> None:
    """Time to first token of questions about pictures, beside questions about texts of equal length."""
    folder = work / "vlm"
    if args.quick:
        make_tiny_vlm(folder, "idefics3")
    else:
        note("making a model of SmolVLM's size")
        make_model(folder, model_folder(args.model), args.tiles)
    options = argparse.Namespace(**vars(args) | {"model": str(folder)})
    server = omlx_server(options, work, name="omlx")
    report.used(server)
    async with server:
        side = args.tiles * TILE
        bench = Bench(server, Corpus(folder), QUICK_SIZE if args.quick else (side, side * 3 // 4))
        await measure(bench, server, args)
    fill(report, bench.cases)


async def measure(bench: Bench, server: Server, args: argparse.Namespace) -> None:
    pairs = [await bench.pair() for _ in range(args.pictures)]
    for pair in pairs:
        await bench.measure(FIRST, pair)
    for rep in range(args.questions):
        await bench.measure(SECOND, pairs[rep % len(pairs)])
    for pair in pairs:
        await bench.measure(OTHER_WORDS, pair, other_words=True)
    for rep in range(args.restarts):
        await server.restart()
        await bench.measure(SECOND_SSD, pairs[rep % len(pairs)])
        await bench.measure(OTHER_WORDS_SSD, pairs[rep % len(pairs)], other_words=True)


def fill(report: Report, cases: dict[str, Case]) -> None:
    title = "Time to first token of a question about a picture and about a text of equal length, seconds"
    table = report.table(title, *COLUMNS)
    for name, case in cases.items():
        add(table, name, case)
        times = {"picture": case.picture, "text": case.text}
        report.samples |= {f"{name}, {what}": [round(a.ttft, 4) for a in answers] for what, answers in times.items()}


def add(table: Table, name: str, case: Case) -> None:
    seen, read = (Spread.of([answer.ttft for answer in answers]).cells() for answers in (case.picture, case.text))
    tokens = [_range([answer.prompt_tokens for answer in case.picture])]
    tokens += [_range([answer.cached_tokens for answer in case.picture])]
    targets = []
    if name != FIRST:
        targets = [Target(f"{name}, encoder calls", max(case.encoded), 0, "at most")]
        targets += [Target(f"{name}, over a text of equal length", case.ratio, MOST_RATIO, "at most", "x")]
    counted = (_range(case.encoded), _range(case.reused))
    table.add(name, *tokens, *counted, *seen[:2], *read, f"{case.ratio:.2f}", f"{case.cpu_ratio:.2f}", targets=targets)


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
