"""The child process in which grammars are tried: `python -m omlx.model.grammar_worker`, see omlx.worker.

llguidance's counters do not bound everything: the intersection of a few dozen patterns is computed for hours. What
ends here within the bounds is computed once more where it is used, as a grammar cannot cross processes.
"""

import json
import re
from functools import lru_cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from omlx.worker import Refused, serve

NOTHING_FITS = "no text fits it"
_MESSAGE_LENGTH = 300
# Around what a message of llguidance's says: a place in our own grammar, and dumps.
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_DUMP = re.compile(r"<state>|<non-verbose/>|\n +\d+ \| |; following special tokens")

# At most 20 ms for a step of the MLX thread, of the requests in a batch each.
LIMITS = LLParserLimits(max_grammar_size=200_000, step_lexer_fuel=200_000, step_max_items=50_000, verbose_errors=False)


def one_line(text: str) -> str:
    """What a message of llguidance's says, in a line."""
    line = " ".join(_PLACE.sub("", _DUMP.split(text)[0]).split())
    if line.startswith("NoExtension"):
        return NOTHING_FITS
    return line if len(line) <= _MESSAGE_LENGTH else line[: _MESSAGE_LENGTH - 3] + "..."


class _Bytes:
    """A vocabulary of the 256 bytes, special tokens up to `size` and one that ends a text, as llguidance reads one."""

    bos_token_id = None

    def __init__(self, size: int) -> None:
        specials = range(256, size + 1)
        self.tokens = [*(bytes([byte]) for byte in range(256)), *(b"\xff<%d>" % token for token in specials)]
        self.special_token_ids = list(specials)
        self.eos_token_id = size

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@lru_cache(maxsize=2)
def _vocabulary(size: int) -> LLTokenizer:
    """The time of compiling does not depend on the words of a vocabulary; but a grammar names tokens by number."""
    return LLTokenizer(TokenizerWrapper(_Bytes(max(size, 256))))


def _handle(request: tuple[str, int] | list[str]) -> str:
    """A grammar and the size of its vocabulary: Refused if it cannot be used. Of a list of grammars: the reasons."""
    if isinstance(request, tuple):
        if reason := _refusal(*request):
            raise Refused(reason)
        return ""
    return json.dumps([_refusal(grammar, 0) for grammar in request])


def _refusal(grammar: str, size: int) -> str:
    """Why a grammar cannot be used, "" if it can."""
    matcher = LLMatcher(_vocabulary(size), grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return one_line(matcher.get_error()) if matcher.is_error() else ""


if __name__ == "__main__":
    serve(_handle)
