"""Other libraries at work on a folder's files: whatever they raise becomes a ModelError of one line."""

from collections.abc import Iterator
from contextlib import contextmanager

from omlx.errors import ModelError, OmlxError

_MESSAGE_LENGTH = 300


@contextmanager
def refusing(subject: object, hidden: str = "") -> Iterator[None]:
    """Turns every error of the block into a ModelError that begins with `subject`, but for omlx's own errors.

    Not Exceptions alone: a panic in Rust (tokenizers) and sys.exit in an architecture's module are others, and no file
    may end a thread or the process. `hidden` is a temporary path that stands for the subject in the libraries' words.
    """
    try:
        yield
    except (OmlxError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        text = one_line(error)
        raise ModelError(f"{subject}: {text.replace(hidden, str(subject)) if hidden else text}") from error


def one_line(error: BaseException) -> str:
    """What an error says, short enough for a message."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        text = f"missing {text}"
    elif isinstance(error, SystemExit):
        text = f"its code tried to end the process ({text})"
    return text if len(text) <= _MESSAGE_LENGTH else text[: _MESSAGE_LENGTH - 3] + "..."
