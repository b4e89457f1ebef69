"""Which token ends an answer in a model's chat format, as its template writes past answers."""

import logging
from typing import Any

from omlx.errors import OmlxError
from omlx.model.chat_template import render

log = logging.getLogger(__name__)

_ANSWER = "probeendword"
_QUESTION = "probestartword"


def end_of_turn(tokenizer: Any, name: str, known: frozenset[int]) -> int | None:
    """The id of the added token that follows an answer at once in the template of model `name`; None if none does.

    Many configs of ChatML models name <|endoftext|> alone, and their answers would never end. `known` are the end
    tokens that the files name: without another added token in the template it is not rendered.
    """
    if not tokenizer.has_chat_template:
        return None
    template = getattr(tokenizer, "chat_template", None)
    added: dict[str, int] = tokenizer.get_added_vocab()
    if isinstance(template, str) and not any(text in template for text, token in added.items() if token not in known):
        return None
    messages = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        shown = render(tokenizer, name, messages, {}, ready=False)
    except OmlxError as error:  # some templates refuse even this; requests say so when they come
        log.debug("model %s: its chat template shows no end of a turn: %s", name, error)
        return None
    _, answer, rest = shown.rpartition(_ANSWER)
    rest = rest.lstrip()
    following = [text for text in added if text and rest.startswith(text)] if answer else []
    return added[max(following, key=len)] if following else None
