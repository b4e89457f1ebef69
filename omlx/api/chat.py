"""What the dialects share: from a parsed body to a request that fits the engine."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from omlx.api.events import Dialect
from omlx.engine.detokenize import TextEngine
from omlx.errors import BadRequest
from omlx.model import chat_template
from omlx.request import Request, SamplingParams


class ServedModel(Protocol):
    """A model that can be asked for; `loaded` if it is in memory now."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> Any: ...

    @property
    def loaded(self) -> bool: ...


class Engine(TextEngine, Protocol):
    """One served model, as the dialects see it (omlx.engine.core has the real one)."""

    @property
    def name(self) -> str: ...

    @property
    def context_length(self) -> int: ...

    @property
    def context_note(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def longest_token(self) -> int: ...


class EnginePool(Protocol):
    """All served models, as the server sees them (omlx.engine.pool has the real one).

    `get` loads a model on first use; it raises NotFound for a name that is not served and ModelError
    when loading fails. `ready` says whether the engine answers.
    """

    async def start(self) -> None: ...

    async def stop(self, timeout_s: float = 10.0) -> None: ...

    def models(self) -> Sequence[ServedModel]: ...

    async def get(self, name: str) -> Engine: ...

    async def ready(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the model's chat template: dicts with `role` and a `content` text."""

    messages: list[dict[str, Any]]
    template_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a client asks for, whatever dialect it spoke.

    `prompt` is a conversation, or text or token ids to be continued. `sampling.max_tokens` 0 means
    as many as fit. `prompt_field` and `max_tokens_field` are how the dialect calls these two.
    """

    model: str
    prompt: ChatPrompt | str | list[int]
    sampling: SamplingParams
    stream: bool = False
    use_cache: bool = True
    cache_salt: str = ""
    prompt_field: str = "messages"
    max_tokens_field: str = "max_tokens"

    @property
    def continues_prompt(self) -> bool:
        """Whether the answer goes on with the prompt's text, in the middle of a word if need be."""
        return not isinstance(self.prompt, ChatPrompt)


Parse = Callable[[dict[str, Any]], tuple[ChatRequest, Dialect]]


async def make_request(engine: Engine, asked: ChatRequest, request_id: str) -> Request:
    """Renders and tokenises, and checks that prompt and answer fit the context.

    Raises BadRequest, which names the field. Works in a thread: a long prompt takes a while.
    """
    tokens = await asyncio.to_thread(tokenize, engine, asked)
    if not tokens:
        raise BadRequest("the prompt is empty", param=asked.prompt_field)
    _check_bias(engine, asked.sampling)
    sampling = replace(asked.sampling, max_tokens=_fitting(engine, asked, len(tokens)))
    return Request(request_id, tokens, sampling, use_cache=asked.use_cache, cache_salt=asked.cache_salt)


def tokenize(engine: Engine, asked: ChatRequest) -> list[int]:
    """Token ids of the prompt. Raises BadRequest."""
    prompt = asked.prompt
    if isinstance(prompt, ChatPrompt):
        text = _bounded(engine, asked, render(engine, prompt))
        return list(engine.tokenizer.encode(text, add_special_tokens=False))
    if isinstance(prompt, str):
        return list(engine.tokenizer.encode(_bounded(engine, asked, prompt)))
    if prompt and not (min(prompt) >= 0 and max(prompt) < engine.vocab_size):
        message = f"{asked.prompt_field}: token ids of this model are from 0 to {engine.vocab_size - 1}"
        raise BadRequest(message, param=asked.prompt_field)
    return prompt


def _bounded(engine: Engine, asked: ChatRequest, text: str) -> str:
    """The text, unless it is too long for the context whatever its tokens are: finding these takes long."""
    most = engine.context_length * engine.longest_token
    if len(text) > most:
        raise BadRequest(
            f"{asked.prompt_field}: {len(text)} characters are more than {engine.context_length} tokens, "
            f"the context length{engine.context_note}, can hold",
            param=asked.prompt_field,
            code="context_length_exceeded",
        )
    return text


def render(engine: Engine, prompt: ChatPrompt) -> str:
    """The conversation as the model's template writes it, ready for the answer. Raises BadRequest."""
    return chat_template.render(engine.tokenizer, engine.name, prompt.messages, prompt.template_args)


def _fitting(engine: Engine, asked: ChatRequest, prompt_tokens: int) -> int:
    """Tokens to generate: as asked, or what the context leaves. Raises BadRequest with the numbers."""
    wanted, limit = asked.sampling.max_tokens, engine.context_length
    if prompt_tokens + max(wanted, 1) <= limit:
        return wanted or limit - prompt_tokens
    if prompt_tokens < limit:
        message = f"{prompt_tokens} prompt tokens + {wanted} {asked.max_tokens_field} = {prompt_tokens + wanted}"
        param = asked.max_tokens_field
    else:
        message, param = f"{prompt_tokens} prompt tokens (and at least 1 for the answer)", asked.prompt_field
    raise BadRequest(
        f"{message} is more than the context length of {limit} tokens{engine.context_note}",
        param=param,
        code="context_length_exceeded",
    )


def _check_bias(engine: Engine, sampling: SamplingParams) -> None:
    for token, _ in sampling.logit_bias:
        if token >= engine.vocab_size:
            raise BadRequest(
                f"logit_bias: token id {token} is not below the vocabulary size {engine.vocab_size}",
                param="logit_bias",
            )
