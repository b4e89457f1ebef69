"""The few kinds of errors omlx raises on purpose; each says whose fault it is.

The HTTP layer maps them to a status by class, never by their text. A message is one
line that names what was wrong and what to do.
"""


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
    """A model folder or file cannot be loaded, converted or fetched."""


class EngineError(OmlxError):
    """The engine failed while working on a request (HTTP 500); the process goes on."""
