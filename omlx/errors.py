"""The few kinds of errors omlx raises on purpose; each says whose fault it is.

The HTTP layer maps them to a status by class, never by their text. A message is one
line that names what was wrong and what to do.
"""

import traceback


class OmlxError(Exception):
    """Base of every error that omlx raises on purpose."""


class BadRequest(OmlxError):
    """The caller sent something that can never work (HTTP 400).

    `param` names the request field, where there is one; `code` is OpenAI's error code. `too_long`: how many tokens a
    prompt has, and how many it may have.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        too_long: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.too_long = too_long


class BadPicture(BadRequest):
    """A picture that the model cannot take; `index` is its number among those of the prompt, from 0."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(f"image {index + 1}: {message}", param="messages")
        self.index = index
        self.reason = message


class NotFound(OmlxError):
    """The caller named something, mostly a model, that does not exist here (HTTP 404); `param` and `code` as above."""

    def __init__(self, message: str, *, param: str | None = "model", code: str | None = "model_not_found") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Overloaded(OmlxError):
    """No room now; the same request may work later (HTTP 503 with Retry-After)."""

    def __init__(self, message: str, *, retry_after_s: int = 5) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SettingError(OmlxError):
    """A flag, environment variable or settings file holds a value that cannot be used."""


class ModelError(OmlxError):
    """A model folder or file cannot be loaded, converted or fetched, or a file of it fails while serving (HTTP 503).

    The message is for the operator and may name paths; clients get `public` instead.
    """

    def __init__(self, message: str, *, public: str | None = None) -> None:
        super().__init__(message)
        self.public = public or "the model cannot be used; the server's log has the reason"


class EngineError(OmlxError):
    """The engine failed while working on a request (HTTP 500); the process goes on."""


def release_frames(error: BaseException) -> None:
    """Drop an error's tracebacks, and the local variables of the functions that it went through; its causes' too.

    For errors that outlive their functions, as those that are handed to another thread do: a traceback keeps every
    local variable alive, a model's weights among them. Call it after the traceback was logged. Functions that still run
    keep their variables.
    """
    seen: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        one = errors.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        errors += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            errors += one.exceptions
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
