"""What a client asks for and what the engine gives back, without tensors or threads."""

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple, Protocol, Self

FinishReason = Literal["stop", "length", "abort"]

GREEDY_BELOW = 1e-4
"""A lower temperature than this is 0: the best token wins anyway, and dividing by it would overflow."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an answer has to look like: any JSON object, JSON of a schema, or a Lark grammar (the latter two in `text`).

    See omlx.model.grammar.
    """

    kind: Literal["json_object", "json_schema", "lark"]
    text: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one answer is sampled. Ranges are checked where a request is parsed.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch a filter off; filters
    apply to the tempered distribution in the order top_k, top_p, min_p. The presence and frequency
    penalties count generated tokens, `repetition_penalty` (1 is off) counts the prompt as well.
    `top_logprobs` None returns no logprobs, n the chosen token's and the n best. With `prompt_logprobs` the prompt's
    tokens have them as well: the prompt is computed, whatever is stored of it.
    `stop` are texts; end-of-text tokens stop unless `ignore_eos`.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None
    prompt_logprobs: bool = False
    ignore_eos: bool = False
    grammar: GrammarSpec | None = None


@dataclass(slots=True)
class RequestStats:
    """What happened to a request so far; times are `time.monotonic()` seconds.

    Written by the MLX thread; complete for the prompt before the first token is handed out.
    `prefilled_tokens` counts the prompt tokens that are in the KV cache by now (restored or
    computed), for progress display.
    """

    arrived: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    cached_ram_tokens: int = 0
    cached_ssd_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0

    @property
    def cached_tokens(self) -> int:
        return self.cached_ram_tokens + self.cached_ssd_tokens


class RequestState(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PAUSED = "paused"
    FINISHED = "finished"


class ImageStart(NamedTuple):
    """A picture begins at this position of a prompt; `digest` (32 bytes) names it by content."""

    position: int
    digest: bytes


class EncoderCost(NamedTuple):
    """Seconds that the encoder takes for a picture, whose last position is in front of `end`, if some are computed."""

    end: int
    seconds: float


class PromptVision(Protocol):
    """The pictures of one prompt, as the scheduler needs them; but for the fields on the MLX thread only.

    `keys` is the prompt as the cache sees it: as long as the request's, with ids made of a picture's digest where
    the model gets that picture's features. `tenant`: the API key that the features count for. `starts` are in order.
    A token behind the last picture stands at the
    rope position of its index plus `rope_delta` (0 for models that count positions like tokens). The features of
    `encoded` pictures were computed for this prompt, those of `reused` were there; restored KV needs none.
    """

    keys: list[int]
    tenant: str
    starts: tuple[ImageStart, ...]
    rope_delta: int
    encoded: int
    reused: int

    def prepare(self, start: int, stop: int, wait_s: float) -> bool:
        """One bounded piece of work towards the features of positions [start, stop); True when they are there.

        Waits no longer than `wait_s` for work that another thread does.
        """

    def release(self) -> None:
        """The features are not needed for now; `prepare` may be called again."""

    def encoder_costs(self) -> list[EncoderCost]:
        """Of the pictures whose features are not stored, as far as the encoder's speed is known by now."""

    def feature_key(self, digest: bytes) -> str:
        """Names the features of a picture where they are stored."""

    def again(self) -> "PromptVision":
        """The same pictures for another request: this one belongs to the request that has it."""


class GrammarMatcher(Protocol):
    """Where an answer stands in its grammar. Answers are followed in copies of the state at their beginning."""

    def deep_copy(self) -> Self: ...

    def consume_token(self, sampled_token: int) -> bool: ...

    def compute_bitmask(self) -> bytes: ...

    def is_stopped(self) -> bool: ...

    def is_accepting(self) -> bool: ...

    def is_error(self) -> bool: ...

    def get_error(self) -> str: ...


http_request_id: ContextVar[str] = ContextVar("http_request_id", default="")
"""The id of the HTTP request that is being worked on: in its task, its threads, and while a step works for it alone."""


class TokenLogprob(NamedTuple):
    """The natural log-probability of a token; `top`: the likeliest in its place (id, log-probability), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Request:
    """One answer to produce. `prompt` holds token ids (at least one).

    `use_cache` False neither reads nor writes the cache. `cache_salt` separates tenants: equal
    prompts under different salts share nothing. `vision`: the prompt's pictures, None if it has none.
    `grammar`: `sampling.grammar`, compiled; the engine does it if nobody did.
    `key_name`: the API key's it came with, `http_id`: the id of the HTTP request; both for the log.
    `prompt_logprobs`, if `sampling` asks for them: of the prompt's tokens from the second one on. Written by the MLX
    thread; complete before the first token of the answer is handed out.
    """

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    use_cache: bool = True
    cache_salt: str = ""
    state: RequestState = RequestState.WAITING
    stats: RequestStats = field(default_factory=RequestStats)
    vision: PromptVision | None = None
    grammar: GrammarMatcher | None = None
    key_name: str = ""
    http_id: str = field(default_factory=http_request_id.get)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.vision is not None:
            self.vision.tenant = self.key_name

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether tokens of the prompt still have to be computed for their log-probabilities."""
        return self.sampling.prompt_logprobs and len(self.prompt_logprobs) < len(self.prompt) - 1

    def cache_tokens(self, tokens: list[int]) -> list[int]:
        """`tokens`, the beginning of prompt and answer, as the cache sees them."""
        if self.vision is None:
            return tokens
        return self.vision.keys[: len(tokens)] + tokens[len(self.vision.keys) :]

    @property
    def images(self) -> tuple[ImageStart, ...]:
        return self.vision.starts if self.vision is not None else ()


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One generated token. `logprob` and `top_logprobs` (token id, natural log) only if asked for.

    The token that ends an answer (end of text) is handed out like the others, with
    `finish_reason` set; an aborted request ends with `token` None.
    """

    request_id: str
    token: int | None
    finish_reason: FinishReason | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


Text = str | tuple[str, str]
"""A text, or a question and a document that may answer it."""


class EncoderInput(NamedTuple):
    """What a model for embeddings or scores reads: token ids, special ones included; `types` (0 and 1) tell the two
    texts of a pair apart."""

    ids: list[int]
    types: list[int] | None = None
