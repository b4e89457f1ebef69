"""Options of a model: those of all models, from flags, and those of one, from `"models"` in settings.json."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from omlx.errors import SettingError
from omlx.model.generation_config import SAMPLING_FIELDS, sampling_value
from omlx.sizes import quoted

GenerationConfigUse = Literal["auto", "none"]

_MOST_NAMES = 64


class ModelOptions(BaseModel):
    """What is said of a model besides its files. None and empty values say nothing.

    `aliases` are more names of it. `max_model_len` (tokens) replaces its context length. `generation_config`: whether
    its generation_config.json says how to sample where a request does not ("auto") or not ("none"). `temperature` to
    `repetition_penalty` say so whatever that file says. `chat_template_kwargs` go to its chat template unless a
    request sets them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)

    aliases: tuple[str, ...] = Field(default=(), max_length=_MOST_NAMES, strict=False)
    max_model_len: int | None = Field(default=None, ge=1, lt=1 << 31)
    generation_config: GenerationConfigUse | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @field_validator(*SAMPLING_FIELDS)
    @classmethod
    def _in_range(cls, value: float | None, info: Any) -> float | None:
        return None if value is None else sampling_value(info.field_name, value)

    @field_validator("aliases")
    @classmethod
    def _names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not name.strip() or not name.isprintable():
                raise ValueError(f"{quoted(name)} is no name of a model")
        return tuple(dict.fromkeys(value))

    @property
    def sampling(self) -> dict[str, float]:
        """The fields of SamplingParams that have defaults here."""
        return {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}

    def over(self, general: "ModelOptions") -> Self:
        """These options, and those of `general` where these say nothing; all the names of both."""
        merged = general.model_dump(exclude_defaults=True) | self.model_dump(exclude_defaults=True)
        return self.model_validate(merged | {"aliases": (*self.aliases, *general.aliases)})


def model_options(value: Any, place: str) -> dict[str, ModelOptions]:
    """The options by model name in a JSON value. Raises SettingError, one line that begins with `place`."""
    if not isinstance(value, Mapping):
        raise SettingError(f'{place} must be an object, such as {{"qwen3-8b": {{"aliases": ["gpt-4o"]}}}}')
    options: dict[str, ModelOptions] = {}
    owner: dict[str, str] = {}
    for name, entry in value.items():
        where = f"{place}: {quoted(name)}"
        try:
            options[name] = ModelOptions.model_validate(entry)
        except ValidationError as error:
            raise SettingError(f"{where}: {_one_line(error)}") from None
        for alias in options[name].aliases:
            if owner.setdefault(alias, name) != name:
                raise SettingError(f"{where}: the alias {quoted(alias)} is one of {quoted(owner[alias])} already")
    return options


def _one_line(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(map(str, first["loc"][:1]))
    if first["type"] == "extra_forbidden":
        return f"{quoted(field)} is not an option of a model; these are: {', '.join(ModelOptions.model_fields)}"
    text = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"].removeprefix("Input ")
    return f"{quoted(field)}: {text}" if field else "must be an object of options"
