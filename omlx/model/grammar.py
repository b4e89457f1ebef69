"""Answers of a given form: a grammar says which tokens may come next. Grammars and masks are llguidance's.

A grammar is compiled in a thread of its own, before its request is queued, and kept for the next request with the
same one. Each request has a state of it, which follows the tokens of its answer on the MLX thread.
"""

import asyncio
import copy
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from omlx.errors import BadRequest, Overloaded
from omlx.model.grammar_worker import LIMITS, NOTHING_FITS, one_line
from omlx.model.json_schema import prepare
from omlx.request import GrammarMatcher, GrammarSpec
from omlx.worker import LimitExceeded, Refused, WorkerPool

LARGEST_TEXT = 256 * 1024
"""Characters of a grammar. What llguidance makes of it is limited by its own counters, which bound the time too."""

# For a grammar, and for those before it.
_WAIT_S = 20.0
_TRIED_TOKENS = 2
_KEPT = 64
_LENIENT = {"x-guidance": {"lenient": True}}
_TRIALS_AT_ONCE = 16  # threads that wait for processes
# One blank or one line break with its indentation, where JSON has white space: models go astray in endless blanks.
_WHITE_SPACE = r"( |\r?\n[ \t]{0,40})"

# Where only one text is possible, llguidance allows only the tokens that its tokenizer makes of it. This allows all.
_UNFORCED = '%llguidance {"no_forcing": true}\n'
# What of a grammar may hold a brace that closes nothing.
_LARK_PIECE = re.compile(r'"(?:\\.|[^"\\])*"|/(?!/)(?:\\.|[^/\\])+/|(?://|#)[^\n]*|[{}]', re.DOTALL)

# Tries a grammar: what does not end within these bounds is refused, before it gets into a thread of this process.
_TRIALS = WorkerPool("omlx.model.grammar_worker", cpu_s=3, memory=768 << 20)


def json_rule(schema: dict[str, Any], *, strict: bool) -> str:
    """JSON that fits `schema`, as an expression of a Lark grammar.

    What of a schema cannot be held to makes the grammar invalid if `strict`, and is passed over otherwise. Raises
    BadRequest for one that is too large or no schema.
    """
    return "%json " + _with_options(schema, strict=strict)


def regex_rule(pattern: str) -> str:
    """A text that the whole of `pattern` matches, as an expression of a Lark grammar."""
    if not pattern:
        return '""'  # two slashes would begin a comment
    document = json.loads(LLMatcher.grammar_from_regex(pattern))
    written: str = document["grammars"][0]["lark_grammar"]
    return written.removeprefix("start: ")


def lark(text: str) -> GrammarSpec:
    """A client's grammar as the whole answer."""
    return GrammarSpec("lark", unforced(text))


def lark_rule(text: str) -> str:
    """A client's grammar as an expression of another one. Raises BadRequest for one that would end too early in it."""
    depth = 0
    for piece in _LARK_PIECE.finditer(text):
        depth += {"{": 1, "}": -1}.get(piece[0], 0)
        if depth < 0:
            line = text.count("\n", 0, piece.start()) + 1
            raise BadRequest(f"line {line} of the grammar: }} without {{")
    return f"%lark {{\n{text}\n}}"


def unforced(text: str) -> str:
    """A Lark grammar in which a client's patterns may spell the text of an end token, in whatever way it is escaped."""
    return _UNFORCED + text


def json_object() -> GrammarSpec:
    """Any JSON object."""
    return GrammarSpec("json_object")


def json_schema(schema: dict[str, Any], *, strict: bool) -> GrammarSpec:
    """JSON that fits a schema; see `json_rule` for `strict`."""
    return GrammarSpec("json_schema", _with_options(schema, strict=strict))


def _with_options(schema: dict[str, Any], *, strict: bool) -> str:
    """The client's own options, if it knows of llguidance's, do not count. Raises BadRequest."""
    return json.dumps(prepare(schema) | {"x-guidance": {"whitespace_pattern": _WHITE_SPACE, "lenient": not strict}})


def _written(spec: GrammarSpec) -> str:
    """The grammar as Lark."""
    if spec.kind == "lark":
        return spec.text
    if spec.kind == "json_object":
        return "start: " + json_rule({"type": "object"}, strict=True)
    return "start: %json " + spec.text


class Grammars:
    """The grammars of one model's answers, compiled as they are asked for. Used from the event loop.

    `vocab_size` is the width of the model's logits; an answer ends with one of `eos_token_ids`. `tokenizer` is a
    TokenizerWrapper over a fast tokenizer; with any other one every grammar is refused.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        # One thread: of many large grammars at a time each would only take longer.
        self._thread = ThreadPoolExecutor(1, "omlx-grammar")
        self._trials = ThreadPoolExecutor(_TRIALS_AT_ONCE, "omlx-grammar-trial")
        self._refused: OrderedDict[GrammarSpec, str] = OrderedDict()
        self.compiled = 0

    async def compile(self, spec: GrammarSpec) -> GrammarMatcher:
        """The state at an answer's beginning, to be copied for each answer.

        Raises BadRequest with the reason, Overloaded if it takes too long.
        """
        found = self._find(spec)
        if found is None:
            try:
                found = await asyncio.wait_for(self._made(spec), _WAIT_S)
            except TimeoutError:
                raise Overloaded(f"its grammar is not ready after {_WAIT_S:.0f} s; try again later") from None
        return found

    async def _made(self, spec: GrammarSpec) -> LLMatcher:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._trials, self._try, spec)
        return await loop.run_in_executor(self._thread, self._compile, spec)

    def _try(self, spec: GrammarSpec) -> None:
        """Raises BadRequest unless compiling it ends within bounds of time and memory."""
        if len(spec.text) > LARGEST_TEXT:
            raise BadRequest(f"the grammar has {len(spec.text)} characters; at most {LARGEST_TEXT} are possible")
        with self._lock:
            reason = self._refused.get(spec)
        if reason is None and self._find(spec) is None:
            # Only grammars of our own name tokens.
            reason = _trial(_written(spec), self._vocab_size if spec.kind == "lark" else 0)
        if reason:
            with self._lock:
                self._refused[spec] = reason
                while len(self._refused) > _KEPT:
                    self._refused.popitem(last=False)
            raise BadRequest(reason)

    def _find(self, spec: GrammarSpec) -> LLMatcher | None:
        with self._lock:
            found = self._kept.get(spec)
            if found is not None:
                self._kept.move_to_end(spec)
        return found

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        found = self._find(spec)
        if found is not None:
            return found
        try:
            matcher = LLMatcher(self._known_tokens(), self._lark(spec), log_level=0, limits=LIMITS)
        except BadRequest:
            raise
        # A fault inside llguidance is no Exception, and fails this one request like an invalid grammar.
        except BaseException as error:
            raise BadRequest(one_line(f"{type(error).__name__}: {error}")) from error
        if reason := one_line(matcher.get_error()) or self._tried(matcher.deep_copy()):
            raise BadRequest(reason)
        self._keep(spec, matcher)
        return matcher

    def _lark(self, spec: GrammarSpec) -> str:
        """The grammar as Lark.

        A text in which an added token is spelled has to be possible without that token, which would end the answer or
        is no text to llguidance. What a pattern spells is not looked for: there are too many ways to write it.
        """
        written = _written(spec)
        ends = [self._tokenizer.decode([token]) for token in self._eos_token_ids]
        texts = [*ends, *(text for text in self._tokenizer.get_added_vocab() if len(text) > 1)]
        spelled = any(text and (text in written or json.dumps(text)[1:-1] in written) for text in texts)
        return unforced(written) if spelled or '"pattern' in written else written

    def _tried(self, matcher: LLMatcher) -> str:
        """Why no answer can begin, "" if one can: some grammars are too complex from their first bracket on."""
        for _ in range(_TRIED_TOKENS):
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            tokens = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
            if matcher.is_error() or not tokens:
                return one_line(matcher.get_error()) or NOTHING_FITS
            if tokens[0] in self._eos_token_ids:
                return ""
            matcher.consume_token(tokens[0])
        matcher.compute_bitmask()
        return one_line(matcher.get_error())

    def _keep(self, spec: GrammarSpec, matcher: LLMatcher) -> None:
        with self._lock:
            self.compiled += 1
            self._kept[spec] = matcher
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)

    def _known_tokens(self) -> LLTokenizer:
        """Made for the first grammar: it takes as long as loading a tokenizer."""
        if self._vocabulary is None:
            if not self._eos_token_ids:
                raise BadRequest("this model has no token for the end of its answer, so none can be held to a form")
            backend = getattr(self._tokenizer, "backend_tokenizer", None)
            if backend is None:
                raise BadRequest("this model's tokenizer has no fast form, so its answers cannot be held to one")
            backend = copy.copy(backend)  # the model's own one may be at work
            backend.no_padding()
            backend.no_truncation()
            size = max(self._vocab_size, backend.get_vocab_size(with_added_tokens=True))
            self._vocabulary = LLTokenizer(backend.to_str(), n_vocab=size, eos_token=self._eos_token_ids)
        return self._vocabulary


def trial_of_schemas(schemas: list[dict[str, Any]]) -> list[str]:
    """Why JSON of each schema cannot be enforced, "" for those that can. Blocks. Raises BadRequest."""
    if not schemas:
        return []
    try:
        reasons: list[str] = json.loads(_TRIALS.call(["start: %json " + json.dumps(one | _LENIENT) for one in schemas]))
        return reasons
    except LimitExceeded as error:
        raise BadRequest(f"it is too complex: {error}") from None


def _trial(grammar: str, vocab_size: int) -> str:
    """Why a grammar cannot be used, "" if it can."""
    try:
        return _TRIALS.call((grammar, vocab_size))
    except Refused as error:
        return str(error)
    except LimitExceeded as error:
        return f"it is too complex: {error}"


class Constraint:
    """Holds one answer to its grammar: a logits processor, to be the last one. For the MLX thread.

    Tokens that may not come next get probability 0, so log-probabilities are those among the tokens that may. A
    complete answer can only end, with one of `end_tokens`. `error` is what made it impossible to go on, "" while all is
    well; what is sampled after it has no form.
    """

    def __init__(self, grammar: GrammarMatcher, prompt_tokens: int, end_tokens: Collection[int] = ()) -> None:
        self._end_tokens = end_tokens
        self._matcher = grammar.deep_copy()
        self._seen = prompt_tokens
        self.error = ""

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """`tokens`: prompt and answer so far, (n,); `logits` (1, vocab)."""
        mx.async_eval(logits)  # the model computes while the mask is made
        self._advance(tokens[self._seen :].tolist())
        mask = self._mask(logits.shape[-1])
        return logits if mask is None else mx.where(mx.array(mask), logits, -mx.inf)

    def _advance(self, fresh: list[int]) -> None:
        self._seen += len(fresh)
        for token in fresh:
            if not self._matcher.is_stopped():  # behind the end a batch still samples a token that nobody gets
                self._matcher.consume_token(token)

    def _mask(self, width: int) -> NDArray[np.bool_] | None:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.zeros(width, bool)
        known = np.unpackbits(bits, bitorder="little", count=min(width, bits.size * 8))
        mask[: known.size] = known
        if not self._matcher.is_accepting():
            # Inside a string such a token would stand for its own text, but the engine would end the answer there.
            mask[[token for token in self._end_tokens if token < width]] = False
        if self._matcher.is_error() or not mask.any():
            self.error = one_line(self._matcher.get_error()) or "no token is possible"
            return None
        return mask
