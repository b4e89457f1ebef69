"""The child process in which chat templates are rendered: `python -m omlx.model.template_worker`, see omlx.worker."""

from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from omlx.worker import Refused, serve

# A template is a program over what the client sent: whatever of it fails is that request's fault.
TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


SYNTAX = "syntax: "
"""How the refusal of a template that does not compile begins."""


@lru_cache(maxsize=16)
def _tokenizer(template: str) -> PreTrainedTokenizerBase:
    """A tokenizer that is nothing but its template: the environment of templates is transformers' own."""
    return PreTrainedTokenizerBase(chat_template=template)


def _render(request: tuple[str, list[dict[str, Any]], dict[str, Any]]) -> str:
    template, messages, options = request
    try:
        return str(_tokenizer(template).apply_chat_template(messages, **options))
    except TemplateSyntaxError as error:
        raise Refused(f"{SYNTAX}line {error.lineno}: {error.message}") from None
    except TEMPLATE_ERRORS as error:
        raise Refused(str(error)) from None


if __name__ == "__main__":
    serve(_render)
