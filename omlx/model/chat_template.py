"""Conversations as a model's chat template writes them."""

import copy
import logging
from collections.abc import Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from omlx.errors import BadRequest, ModelError, Overloaded
from omlx.model.template_worker import SYNTAX, TEMPLATE_ERRORS
from omlx.worker import LimitExceeded, Refused, WorkerPool

log = logging.getLogger(__name__)

_PROCESSES = WorkerPool("omlx.model.template_worker", cpu_s=4, memory=1 << 30)

class TemplateRefused(BadRequest):
    """A chat template that does not take a conversation."""


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

    Blocks. Raises BadRequest for a model without a template, for what the template refuses, and for a template that
    takes too much time or memory; ModelError for one that does not compile; Overloaded if no process can be started
    for it.
    """
    if reserved := _RESERVED_ARGS & args.keys():
        raise BadRequest(f"chat_template_kwargs must not set {min(reserved)!r}", param="chat_template_kwargs")
    if not tokenizer.has_chat_template:
        raise BadRequest(f"model {model!r} has no chat template; use /v1/completions", param="model")
    options = args | ({"tools": list(tools)} if tools else {})
    if _is_jinja(tokenizer):
        tokenizer = _elsewhere(tokenizer, model)
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=ready, tokenize=False, **options))
    except (*TEMPLATE_ERRORS, Refused) as error:
        if isinstance(error, Refused) and str(error).startswith(SYNTAX):
            raise _broken(model, str(error).removeprefix(SYNTAX)) from None
        raise TemplateRefused(f"the model's chat template refused the messages: {error}", param="messages") from error
    except (LimitExceeded, MemoryError) as error:
        reason = str(error) or "out of memory"
        log.warning("model %s: its chat template failed: %s", model, reason)
        raise BadRequest(f"the model's chat template failed on these messages: {reason}", param="messages") from None


def _broken(model: str, reason: str) -> ModelError:
    text = f"the chat template of model {model!r} does not compile ({reason}); /v1/completions works without it"
    return ModelError(text, public=text)


def check_templates(tokenizer: Any, model: str) -> None:
    """Logs a warning for each of the model's templates that does not compile."""
    if not tokenizer.has_chat_template or not _is_jinja(tokenizer):
        return
    templates = tokenizer.chat_template
    for name, text in templates.items() if isinstance(templates, dict) else [("", templates)]:
        try:
            _PROCESSES.call((text, [{"role": "user", "content": ""}], {}), model)
        except Refused as error:
            if str(error).startswith(SYNTAX):
                which = f" {name!r}" if name else ""
                reason = str(error).removeprefix(SYNTAX)
                log.warning(
                    "model %s: its chat template%s does not compile (%s): chat requests fail, /v1/completions works",
                    model, which, reason,
                )  # fmt: skip
        except (LimitExceeded, Overloaded):
            pass  # found out again, and said, when requests come


def _is_jinja(tokenizer: Any) -> bool:
    """Whether the template is a text that anyone may have written, and not a function of mlx-lm's."""
    if not isinstance(tokenizer, TokenizerWrapper) or tokenizer._chat_template is not None:
        return False
    return type(tokenizer._tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template


def _elsewhere(tokenizer: Any, model: str) -> Any:
    """The tokenizer with its templates rendered in a process that can be stopped.

    mlx-lm's wrapper passes what it makes of the arguments on to the tokenizer inside it, which is replaced here.
    """
    wrapper = copy.copy(tokenizer)
    object.__setattr__(wrapper, "_tokenizer", _Remote(tokenizer._tokenizer, model))
    return wrapper


class _Remote:
    """Renders a transformers tokenizer's templates in a worker process."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: str) -> None:
        self._tokenizer = tokenizer
        self._model = model

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        template = self._tokenizer.get_chat_template(None, options.get("tools"))
        # What the client sets hides a special token, as in transformers.
        options = {**self._tokenizer.special_tokens_map, **options}
        return _PROCESSES.call((template, messages, options), self._model)
