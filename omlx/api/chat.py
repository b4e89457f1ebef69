"""What the dialects share: from a parsed body to a request that fits the engine."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, ParamSpec, Protocol, TypeVar

from omlx.api.answer_format import has_tool_template
from omlx.api.embeddings import EmbedderPool
from omlx.api.events import Dialect
from omlx.api.tool_prompt import spelled_out, without_billing_line
from omlx.engine.detokenize import TextEngine
from omlx.errors import BadPicture, BadRequest, ModelError
from omlx.model import chat_template
from omlx.model.control_tokens import Literals, RenderedPrompt, control_tokens
from omlx.model.foreign import refusing
from omlx.model.generation_config import SAMPLING_FIELDS
from omlx.model.images import Picture
from omlx.model.template_habits import STRICTEST, Adapted, TemplateHabits, adapted, habits_of
from omlx.request import GrammarMatcher, GrammarSpec, PromptVision, Request, SamplingParams

log = logging.getLogger("omlx.server")


class ServedModel(Protocol):
    """A model that can be asked for; `loaded` if it is in memory now. `aliases` are more names of it.

    `kind`: "text", "vision" (text about images too), "embedding" or "rerank". `note`: why a vision model is of kind
    "text".
    """

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> Any: ...

    @property
    def loaded(self) -> bool: ...

    @property
    def kind(self) -> str: ...

    @property
    def note(self) -> str: ...

    @property
    def aliases(self) -> Sequence[str]: ...


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

    @property
    def most_requests(self) -> int: ...

    @property
    def sampling_defaults(self) -> Mapping[str, Any]: ...

    @property
    def template_defaults(self) -> Mapping[str, Any]: ...

    @property
    def vision(self) -> "VisionPrompts | None": ...

    async def compile(self, spec: GrammarSpec) -> GrammarMatcher: ...


class VisionPrompts(Protocol):
    """Makes the prompts of a vision model (omlx.engine.vlm has the real one); in any thread."""

    @property
    def marks(self) -> frozenset[str]:
        """The texts that stand for a picture."""

    def prompt(
        self,
        messages: list[dict[str, Any]],
        template_args: dict[str, Any],
        pictures: Sequence[Picture],
        salt: str = "",
        tools: Sequence[dict[str, Any]] = (),
        *,
        literals: Literals = None,
        use_cache: bool = True,
    ) -> tuple[list[int], PromptVision | None]:
        """Token ids, and the pictures in them: the k-th part {"type": "image"} is `pictures[k]`. Raises BadRequest.

        `literals`: see `model.control_tokens.RenderedPrompt`.
        Without `use_cache` nothing that is stored of the pictures is used, and nothing is stored.
        """


class Asker(Protocol):
    """Who asks (omlx.access.keys has the real one): a name for the log, and what separates the cache."""

    @property
    def name(self) -> str: ...

    def cache_salt(self, asked: str = "") -> str: ...


class EnginePool(EmbedderPool, Protocol):
    """All served models, as the server sees them (omlx.engine.pool has the real one).

    `get` loads a model on first use; it raises NotFound for a name that is not served and ModelError
    when loading fails. `loading` maps the models that are being loaded to how far they are. `ready` says whether the
    engine answers.
    """

    async def start(self) -> None: ...

    async def stop(self, timeout_s: float = 10.0) -> None: ...

    def models(self) -> Sequence[ServedModel]: ...

    async def get(self, name: str) -> Engine: ...

    def loading(self) -> Mapping[str, str]: ...

    async def ready(self) -> bool: ...


class ImagePart(NamedTuple):
    """An image of a request: where it is to be had (a data: URL holds it), and its place in the body for messages.

    `from_tool`: a tool returned it, so no request fails for it.
    """

    url: str
    place: str
    from_tool: bool = False

    def __repr__(self) -> str:
        return f"ImagePart({self.place})"  # the URL may hold megabytes


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the model's chat template: dicts with `role` and a `content` text.

    An assistant's may have `tool_calls` (with `arguments` as objects) and `reasoning_content`, a tool's has
    `tool_call_id` and `name` where they are known. `tools` are what may be called, as `tool_prompt.canonical_tools`
    gives them. A message with images (of the user or a tool) has its content in parts; the k-th part
    {"type": "image"} of all messages is `images[k]`, and `pictures[k]` once they were read (see api.pictures).
    """

    messages: list[dict[str, Any]]
    template_args: dict[str, Any] = field(default_factory=dict)
    tools: tuple[dict[str, Any], ...] = ()
    images: tuple[ImagePart, ...] = ()
    pictures: tuple[Picture, ...] = ()


class ToolChoice(NamedTuple):
    """Whether tools may be called: "auto" leaves it to the model, "named" asks for the tool `name`.

    With `parallel` False at most one call is wanted. `strict`: the arguments of calls have to fit their schemas.
    `allowed`: only these tools may be called, () stands for all of them.
    """

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""
    parallel: bool = True
    strict: bool = False
    allowed: tuple[str, ...] = ()


AUTO = ToolChoice()

P = ParamSpec("P")

# Tokens of models that fill in the middle of a text, and what follows each: Qwen and others, StarCoder, DeepSeek,
# Code Llama, Codestral.
_FILL_IN_MARKS = (
    (("<|fim_prefix|>", "prefix"), ("<|fim_suffix|>", "suffix"), ("<|fim_middle|>", "")),
    (("<fim_prefix>", "prefix"), ("<fim_suffix>", "suffix"), ("<fim_middle>", "")),
    (
        ("<\uff5cfim\u2581begin\uff5c>", "prefix"),
        ("<\uff5cfim\u2581hole\uff5c>", "suffix"),
        ("<\uff5cfim\u2581end\uff5c>", ""),
    ),
    (("\u2581<PRE>", "prefix"), ("\u2581<SUF>", "suffix"), ("\u2581<MID>", "")),
    (("<PRE>", "prefix"), ("<SUF>", "suffix"), ("<MID>", "")),
    (("[SUFFIX]", "suffix"), ("[PREFIX]", "prefix")),
)

MOST_LOGPROBS = 200_000  # of a prompt's tokens, alternatives included

_PROMPT_THREADS = 4
_prompt_threads: dict[str, ThreadPoolExecutor] = {}  # by the names of the models that were used

# A text of up to so many characters is tokenized as a whole; a longer one is counted first, in pieces of this size.
_UNCOUNTED = 1 << 20
_PIECE = 1 << 18

# OpenAI's words. Clients know by them that a model with a longer context may do (litellm, agents that shorten).
_LONGEST = "this model's maximum context length is"


class OutputFormat(NamedTuple):
    """What the text of the answer has to be.

    A JSON object, JSON that fits `schema`, one of `choices`, or what the regular expression or Lark grammar `text`
    matches.
    """

    kind: Literal["json_object", "json_schema", "choice", "regex", "grammar"]
    schema: dict[str, Any] | bool | None = None
    strict: bool = False
    choices: tuple[str, ...] = ()
    text: str = ""


def unset_fields(fields: object) -> frozenset[str]:
    """Of the fields that models may have defaults for, those that a body leaves out or does not have."""
    return frozenset(name for name in SAMPLING_FIELDS if getattr(fields, name, None) is None)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a client asks for, whatever dialect it spoke.

    `prompt` is a conversation, or text or token ids to be continued; `more_prompts` are further ones of the latter,
    answered side by side. Each prompt gets `n` choices. `echo`: a choice begins with its prompt's text. `prompt_only`:
    nothing follows it. `suffix`: the answer is what belongs between the prompt and this text.
    `sampling.max_tokens` 0 means as many as fit; more than fit are as many as fit. `prompt_field` is the dialect's name
    of the prompt, `format_field` the one of what `output_format` comes from. `key_name` is the API key's, "" where
    none is asked for. `unset`: fields of `sampling` that the client left out, for which the model may have defaults.
    """

    model: str
    prompt: ChatPrompt | str | list[int]
    sampling: SamplingParams
    stream: bool = False
    use_cache: bool = True
    cache_salt: str = ""
    prompt_field: str = "messages"
    more_prompts: tuple[str | list[int], ...] = ()
    n: int = 1
    suffix: str = ""
    echo: bool = False
    prompt_only: bool = False
    tool_choice: ToolChoice = AUTO
    output_format: OutputFormat | None = None
    format_field: str = "response_format"
    key_name: str = ""
    unset: frozenset[str] = frozenset()

    def asked_by(self, key: Asker) -> "ChatRequest":
        """The same, as who came with this API key is answered: with its cache and under its name in the log."""
        return replace(self, cache_salt=key.cache_salt(self.cache_salt), key_name=key.name)

    @property
    def continues_prompt(self) -> bool:
        """Whether the answer goes on with the prompt's text, in the middle of a word if need be."""
        return not isinstance(self.prompt, ChatPrompt)


Tools = Sequence[dict[str, Any]]
T = TypeVar("T")
Parse = Callable[[dict[str, Any]], tuple[ChatRequest, Dialect]]


async def make_request(engine: Engine, asked: ChatRequest, request_id: str) -> Request:
    """Renders and tokenises, and checks that prompt and answer fit the context.

    Raises BadRequest, which names the field. Works in a thread: a long prompt takes a while.
    """
    tokens, vision = await in_prompt_thread(engine, prompt_tokens, engine, asked)
    if not tokens:
        raise BadRequest("the prompt is empty", param=asked.prompt_field)
    _check_bias(engine, asked.sampling)
    if asked.sampling.prompt_logprobs:
        _check_logprobs(asked, len(tokens))
    defaults = {name: value for name, value in engine.sampling_defaults.items() if name in asked.unset}
    sampling = replace(asked.sampling, max_tokens=_fitting(engine, asked, len(tokens)), **defaults)
    return Request(
        request_id,
        tokens,
        sampling,
        use_cache=asked.use_cache,
        cache_salt=asked.cache_salt,
        vision=vision,
        key_name=asked.key_name,
    )


async def in_prompt_thread(engine: Engine, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """What `work` returns, called in one of the threads that make this model's prompts.

    A model has threads of its own, so that one whose template takes seconds delays no other model.
    """
    threads = _prompt_threads.get(engine.name)
    if threads is None:
        threads = _prompt_threads[engine.name] = ThreadPoolExecutor(_PROMPT_THREADS, "omlx-prompt")
    return await asyncio.get_running_loop().run_in_executor(threads, partial(work, *args, **options))


def prompt_tokens(engine: Engine, asked: ChatRequest) -> tuple[list[int], PromptVision | None]:
    """Token ids of the prompt, and its pictures. Raises BadRequest."""
    prompt = asked.prompt
    if isinstance(prompt, ChatPrompt):
        check_length(engine, prompt, asked.prompt_field)
    if engine.vision is None or not isinstance(prompt, ChatPrompt):
        return tokenize(engine, asked), None
    assert len(prompt.pictures) == len(prompt.images), "the images were not read"
    vision, salt, cached = engine.vision, asked.cache_salt, asked.use_cache
    safe, literals = _sanitized(engine, prompt)

    def with_pictures(messages: list[dict[str, Any]], tools: Tools) -> tuple[list[int], PromptVision | None]:
        args, pictures = safe.template_args, prompt.pictures
        return vision.prompt(messages, args, pictures, salt, tools, literals=literals, use_cache=cached)

    try:
        return _for_template(engine, safe, with_pictures)
    except BadPicture as error:
        place = prompt.images[error.index].place
        raise BadRequest(f"{place}: {error.reason}", param=place) from None


def tokenize(engine: Engine, asked: ChatRequest) -> list[int]:
    """Token ids of a prompt without pictures. Raises BadRequest."""
    prompt = asked.prompt
    if asked.suffix:
        return _fill_in_tokens(engine, replace(asked, suffix=""), asked.suffix)
    if isinstance(prompt, ChatPrompt):
        return encode(engine, render(engine, prompt), asked.prompt_field, special=False)
    if isinstance(prompt, str):
        return encode(engine, prompt, asked.prompt_field)
    if prompt and not (min(prompt) >= 0 and max(prompt) < engine.vocab_size):
        message = f"{asked.prompt_field}: token ids of this model are from 0 to {engine.vocab_size - 1}"
        raise BadRequest(message, param=asked.prompt_field)
    return prompt


def _fill_in_tokens(engine: Engine, asked: ChatRequest, suffix: str) -> list[int]:
    """The prompt of a request for the text between its prompt and `suffix`, as models are trained to fill it in."""
    known = engine.tokenizer.get_added_vocab()
    order = next((marks for marks in _FILL_IN_MARKS if all(mark in known for mark, _ in marks)), None)
    if order is None:
        message = f"suffix: model {engine.name!r} has no fill-in-the-middle tokens"
        raise BadRequest(message, param="suffix", code="unsupported_parameter")
    before = tokenize(engine, asked)
    bos = engine.tokenizer.bos_token_id
    start = before[:1] if bos is not None and before[:1] == [bos] else []
    parts = {"prefix": before[len(start) :], "suffix": encode(engine, suffix, "suffix", special=False), "": []}
    return start + [token for mark, part in order for token in (known[mark], *parts[part])]


def encode(engine: Engine, text: str | RenderedPrompt, field: str, *, special: bool = True) -> list[int]:
    """Token ids of a text, which the client's `field` held; `special`: with those that begin every text.

    In a text that the client wrote as a whole the special tokens are real. Raises BadRequest for one that is too long
    for the context whatever its tokens are: finding these takes long.
    """
    prompt = text if isinstance(text, RenderedPrompt) else RenderedPrompt(text)
    text = prompt.plain
    most = engine.context_length * engine.longest_token
    if len(text) > most:
        raise _too_long(engine, field, f"{len(text)} characters are more than {engine.context_length} tokens can hold")
    with tokenizing(engine.name):
        if len(text) > max(engine.context_length, _UNCOUNTED):
            _check_count(engine, text, field)
        return control_tokens(engine.tokenizer, _marks(engine)).encode(prompt, special=special)


def _check_count(engine: Engine, text: str, field: str) -> None:
    """Raises BadRequest for a text with far more tokens than the context; counted in pieces.

    A token is some 150 bytes in the tokenizer's own result, and freeing millions of them holds the GIL.
    """
    most = 2 * engine.context_length + len(text) // _PIECE
    count = 0
    for start in range(0, len(text), _PIECE):
        count += len(engine.tokenizer.encode(text[start : start + _PIECE], add_special_tokens=False))
        if count > most:
            raise _too_long(engine, field, f"the first {start + _PIECE} characters have {count} tokens")


def _too_long(engine: Engine, field: str, what: str) -> BadRequest:
    return BadRequest(
        f"{field}: {what}, and {_LONGEST} {engine.context_length}{engine.context_note}",
        param=field,
        code="context_length_exceeded",
    )


@contextmanager
def tokenizing(model: str) -> Iterator[None]:
    """Turns whatever a model's tokenizer raises, a panic included, into a ModelError, and logs it."""
    try:
        with refusing(f"model {model}: its tokenizer failed"):
            yield
    except ModelError as error:
        log.warning("%s", error)
        raise ModelError(str(error), public=f"the tokenizer of model {model!r} failed on this text") from None


def check_length(engine: Engine, prompt: ChatPrompt, field: str) -> None:
    """Raises BadRequest, which names `field`, for messages that are too long for the context whatever their tokens are.

    To be called before they are rendered, which copies them several times.
    """
    length = sum(map(_characters, prompt.messages))
    if length > engine.context_length * engine.longest_token:
        raise _too_long(engine, field, f"{length} characters are more than {engine.context_length} tokens can hold")


def render(engine: Engine, prompt: ChatPrompt, *, ready: bool = True) -> RenderedPrompt:
    """The conversation as the model's template writes it; `ready`: for the answer. Raises BadRequest."""
    safe, literals = _sanitized(engine, prompt)

    def text(messages: list[dict[str, Any]], tools: Tools) -> str:
        return chat_template.render(engine.tokenizer, engine.name, messages, safe.template_args, tools, ready=ready)

    return RenderedPrompt(_for_template(engine, safe, text), literals)


def _sanitized(engine: Engine, prompt: ChatPrompt) -> tuple[ChatPrompt, Literals]:
    """The prompt with placeholders for special tokens in what the client wrote, and what they stand for."""
    control = control_tokens(engine.tokenizer, _marks(engine))
    safe = control.sanitized(prompt.messages, {**engine.template_defaults, **prompt.template_args}, prompt.tools)
    return replace(prompt, messages=safe.messages, template_args=safe.args, tools=safe.tools), safe.literals


def _marks(engine: Engine) -> frozenset[str]:
    return frozenset() if engine.vision is None else engine.vision.marks


def template_changes(engine: Engine, prompt: ChatPrompt) -> tuple[str, ...]:
    """What is changed of the messages so that the model's template takes them, a phrase each."""
    return _adapted(engine, prompt, _habits(engine, prompt))[0].changes


def _for_template(engine: Engine, prompt: ChatPrompt, use: Callable[[list[dict[str, Any]], Tools], T]) -> T:
    """`use` of the messages and tools as the template takes them.

    What a template refuses all the same is tried once more in the plainest form: its trial cannot foresee everything.
    """
    (messages, _), tools = _adapted(engine, prompt, _habits(engine, prompt))
    try:
        return use(messages, tools)
    except chat_template.TemplateRefused:
        (plainest, _), tools = _adapted(engine, prompt, STRICTEST)
        try:
            return use(plainest, tools)
        except chat_template.TemplateRefused:
            pass
        raise


def _habits(engine: Engine, prompt: ChatPrompt) -> TemplateHabits:
    tools = bool(prompt.tools) and has_tool_template(engine.tokenizer)
    return habits_of(engine.tokenizer, engine.name, tools=tools)


def _adapted(engine: Engine, prompt: ChatPrompt, habits: TemplateHabits) -> tuple[Adapted, Tools]:
    """The messages for the template, and the tools for one that knows of tools; for others the messages have them.

    Raises BadRequest for tools that are too long for the context: templates write them with json.dumps, which holds
    the GIL.
    """
    most = engine.context_length * engine.longest_token
    if sum(map(_characters, prompt.tools)) > most:
        raise _too_long(engine, "tools", f"more than {most} characters")
    messages = without_billing_line(prompt.messages)
    if not has_tool_template(engine.tokenizer):
        return adapted(spelled_out(messages, prompt.tools), habits), ()
    return adapted(messages, habits), prompt.tools


def _characters(value: Any) -> int:
    """Characters of all texts in a value."""
    if isinstance(value, dict):
        return sum(map(len, value)) + sum(map(_characters, value.values()))
    if isinstance(value, list):
        return sum(map(_characters, value))
    return len(value) if isinstance(value, str) else 0


def _fitting(engine: Engine, asked: ChatRequest, prompt_tokens: int) -> int:
    """Tokens to generate: as asked, or what the context leaves. Raises BadRequest for a prompt that leaves nothing.

    Agents ask for 32,000 tokens whatever the model is.
    """
    wanted, limit = asked.sampling.max_tokens, engine.context_length
    left = limit - prompt_tokens
    if left > 0:
        return min(wanted, left) if wanted else left
    raise BadRequest(
        f"{prompt_tokens} prompt tokens (and at least 1 for the answer), but {_LONGEST} {limit} tokens"
        f"{engine.context_note}",
        param=asked.prompt_field,
        code="context_length_exceeded",
        too_long=(prompt_tokens, limit),
    )


def _check_logprobs(asked: ChatRequest, tokens: int) -> None:
    """All log-probabilities of a prompt are in memory at a time, and in one answer."""
    values = tokens * (1 + (asked.sampling.top_logprobs or 0))
    if values > MOST_LOGPROBS:
        raise BadRequest(
            f"logprobs: {tokens} prompt tokens with {asked.sampling.top_logprobs} alternatives each are {values} "
            f"values; the limit is {MOST_LOGPROBS}. Send a shorter prompt or ask for fewer alternatives.",
            param="logprobs",
        )


def _check_bias(engine: Engine, sampling: SamplingParams) -> None:
    for token, _ in sampling.logit_bias:
        if token >= engine.vocab_size:
            raise BadRequest(
                f"logit_bias: token id {token} is not below the vocabulary size {engine.vocab_size}",
                param="logit_bias",
            )
