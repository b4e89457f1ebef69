"""Conversations as a model's chat template writes them."""

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from omlx.errors import BadRequest

# A template is a program over what the client sent: whatever of it fails is that request's fault.
_TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)

# Would change what the call does rather than what the template shows.
_RESERVED_ARGS = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "tools", "truncation",
})  # fmt: skip


def render(
    tokenizer: Any,
    model: str,
    messages: list[dict[str, Any]],
    args: dict[str, Any],
    tools: Sequence[dict[str, Any]] = (),
    *,
    ready: bool = True,
) -> str:
    """The conversation as `model`'s template writes it; `ready`: for the answer. `args` go to the template.

    Raises BadRequest for a model without a template, and for what the template refuses.
    """
    if reserved := _RESERVED_ARGS & args.keys():
        raise BadRequest(f"chat_template_kwargs must not set {min(reserved)!r}", param="chat_template_kwargs")
    if not tokenizer.has_chat_template:
        raise BadRequest(f"model {model!r} has no chat template; use /v1/completions", param="model")
    try:
        named = {"tools": list(tools)} if tools else {}
        return str(
            tokenizer.apply_chat_template(messages, add_generation_prompt=ready, tokenize=False, **named, **args)
        )
    except _TEMPLATE_ERRORS as error:
        raise BadRequest(f"the model's chat template refused the messages: {error}", param="messages") from error
