"""From what a client asks for to the requests that make its answer, and the form that the answer has."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from omlx.api.answer_format import PLAIN, AnswerFormat, answer_format, call_syntax
from omlx.api.answering import Generation
from omlx.api.chat import ChatPrompt, ChatRequest, Engine, in_prompt_thread, make_request
from omlx.api.constraints import constrained, without_problems
from omlx.api.marks import added_tokens
from omlx.engine.detokenize import continued_text
from omlx.errors import BadRequest
from omlx.request import GrammarMatcher, GrammarSpec, Request, RequestStats, SamplingParams

_NEVER = -100.0

# Enough to see whether a template opened the model's thinking at a prompt's end.
_END_TOKENS = 16


async def make_generation(engine: Engine, asked: ChatRequest, request_id: str) -> Generation:
    """All requests that the answer takes. Raises BadRequest, which names the field."""
    prompts = [asked.prompt, *asked.more_prompts]
    _check_number(engine, asked, len(prompts) * asked.n)
    asked = replace(asked, sampling=_without_calls(engine, asked))
    firsts = [
        await make_request(engine, replace(asked, prompt=prompt), _choice_id(request_id, index * asked.n))
        for index, prompt in enumerate(prompts)
    ]
    form = answer_form(engine, asked, firsts[0].prompt)
    with _naming_field(asked):
        grammar, form, compiled = await _compiled(engine, asked, form)
    requests = [
        _choice(_held(first, grammar, compiled), request_id, at * asked.n, k)
        for at, first in enumerate(firsts)
        for k in range(asked.n)
    ]
    return Generation(
        tuple(requests),
        form,
        asked.n,
        asked.continues_prompt,
        tuple(_text_of(engine, prompt) for prompt in prompts) if asked.echo else (),
        asked.prompt_only,
    )


async def _compiled(
    engine: Engine, asked: ChatRequest, form: AnswerFormat
) -> tuple[GrammarSpec | None, AnswerFormat, GrammarMatcher | None]:
    """The grammar of an answer, and the format that it has then.

    Keywords of schemas that cannot be enforced are left out if they need not be. Raises BadRequest.
    """
    try:
        grammar, held = constrained(asked, form, engine.tokenizer)
        return grammar, held, None if grammar is None else await engine.compile(grammar)
    except BadRequest as error:
        relaxed = await in_prompt_thread(engine, without_problems, asked, form.tools, str(error))
    asked, tools = relaxed
    grammar, held = constrained(asked, replace(form, tools=tools), engine.tokenizer)
    compiled = None if grammar is None else await engine.compile(grammar)
    return grammar, replace(held, tools=form.tools), compiled


def _check_number(engine: Engine, asked: ChatRequest, choices: int) -> None:
    if choices > engine.most_requests:
        field = "n" if asked.n > 1 else asked.prompt_field
        raise BadRequest(
            f"{field}: {choices} answers were asked for; at most {engine.most_requests} requests may run or wait here",
            param=field,
        )


def _without_calls(engine: Engine, asked: ChatRequest) -> SamplingParams:
    """With `tool_choice` none the mark that begins a call is held down, where it is a token of its own.

    The tools stay in the prompt: it is the same as with them, and so is what is cached of it.
    """
    if asked.tool_choice.mode != "none" or not isinstance(asked.prompt, ChatPrompt) or not asked.prompt.tools:
        return asked.sampling
    begin = added_tokens(engine.tokenizer).get(call_syntax(engine.tokenizer).start)
    if begin is None:
        return asked.sampling
    bias = dict(asked.sampling.logit_bias) | {begin: _NEVER}
    return replace(asked.sampling, logit_bias=tuple(sorted(bias.items())))


@contextmanager
def _naming_field(asked: ChatRequest) -> Iterator[None]:
    """What is wrong with a grammar, as a fault of the field that asked for it."""
    try:
        yield
    except BadRequest as error:
        field = asked.format_field if asked.output_format is not None else "tools"
        raise BadRequest(f"{field}: it cannot be enforced: {error}", param=field) from error


def _held(request: Request, grammar: GrammarSpec | None, compiled: GrammarMatcher | None) -> Request:
    """The request with the grammar that its answer is held to."""
    return replace(request, sampling=replace(request.sampling, grammar=grammar), grammar=compiled)


def _choice_id(request_id: str, index: int) -> str:
    return f"{request_id}-{index}" if index else request_id


def _choice(first: Request, request_id: str, base: int, k: int) -> Request:
    """The k-th choice of a prompt, whose first one has the index `base`: the same request with other random draws."""
    if k == 0:
        return first
    seed = first.sampling.seed
    sampling = replace(first.sampling, seed=None if seed is None else seed + k)
    name = _choice_id(request_id, base + k)
    vision = None if first.vision is None else first.vision.again()
    return replace(
        first, request_id=name, sampling=sampling, stats=RequestStats(), vision=vision, prompt_logprobs=[]
    )


def answer_form(engine: Engine, asked: ChatRequest, prompt: list[int]) -> AnswerFormat:
    """How the answer to a prompt (its tokens) is marked. A text that is continued has no marks."""
    if not isinstance(asked.prompt, ChatPrompt):
        return PLAIN
    tools = () if asked.tool_choice.mode == "none" else asked.prompt.tools
    end = engine.tokenizer.decode(prompt[-_END_TOKENS:])
    return answer_format(engine.tokenizer, end, tools, one_call=not asked.tool_choice.parallel)


def _text_of(engine: Engine, prompt: ChatPrompt | str | list[int]) -> str:
    assert not isinstance(prompt, ChatPrompt)
    return prompt if isinstance(prompt, str) else continued_text(engine.tokenizer, prompt)
