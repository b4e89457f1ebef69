"""The tokenizer of micro-vlm: byte-level BPE with a small vocabulary, so that any text can be encoded."""

import json
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from training.micro_vlm import conversations, wording

VOCAB = 768
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<end_of_utterance>"
AROUND, IMAGE, GLOBAL = "<fake_token_around_image>", "<image>", "<global-img>"
SPECIAL = (PAD, START, END, AROUND, IMAGE, GLOBAL)
IMAGE_TOKENS = 16
EXPANDED = AROUND + GLOBAL + IMAGE * IMAGE_TOKENS + AROUND  # as Idefics3's processor writes a picture that is not split

# Pictures are numbered: without that it takes the model long to find out which one is meant by "the second picture".
CHAT_TEMPLATE = (
    "{%- set pictures = namespace(count=0) -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}"
    "{%- set pictures.count = pictures.count + 1 -%}{{- pictures.count ~ ':<image>' -}}"
    "{%- elif part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{- '<end_of_utterance>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def render(messages: Iterable[conversations.Message]) -> str:
    """What CHAT_TEMPLATE makes of the messages, with the pictures expanded."""
    parts, numbers = [], count(1)
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = "".join(part["text"] if "text" in part else f"{next(numbers)}:{EXPANDED}" for part in content)
        parts.append(f"{START}{message['role']}\n{content}{END}\n")
    return "".join(parts)


def train_tokenizer(examples: int = 6000) -> Tokenizer:
    """A tokenizer made from `examples` of our own conversations and every word we know."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(examples), trainer)
    return tokenizer


def _corpus(examples: int) -> Iterable[str]:
    rng = Random("tokenizer")
    for _ in range(examples):
        made = conversations.conversation(rng)
        for turn in made.turns:
            yield "\n".join(["user\n", *(part.get("text", "") for part in turn.parts)])
            yield f"assistant\n{turn.answer}"
        yield f"system\n{made.system}"
    yield " ".join(wording.WORDS)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and what transformers wants beside it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "pad_token": PAD,
        "eos_token": END,
        "bos_token": START,
        "additional_special_tokens": [AROUND, IMAGE, GLOBAL],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
