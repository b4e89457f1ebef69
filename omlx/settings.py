"""Every option of omlx, declared once: its name, type, default and help text.

One name has three spellings: `block_size` is `--block-size` as a flag, `OMLX_BLOCK_SIZE` in the
environment and `"block_size"` in `settings.json` under the home folder. A flag wins over the
environment, that over the file, that over the default. All three are read as text and take the
same road through `Settings`, so a value gets the same verdict wherever it stands.
"""

import difflib
import json
import os
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from omlx.errors import SettingError
from omlx.model.options import GenerationConfigUse, ModelOptions, model_options
from omlx.sizes import (
    GB,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
    quoted,
    total_disk,
    total_memory,
)

if TYPE_CHECKING:
    from omlx.scheduler import SchedulerConfig

Exact = Literal["auto", "on", "strict", "off"]
WritePolicy = Literal["through", "back"]
LogLevel = Literal["debug", "info", "warning", "error"]
KeyCacheSalt = Literal["none", "auto"]

MASK = "********"
_SECRETS = ("api_key", "admin_key")
# May hold several values: the flag is repeated, elsewhere commas stand between them (in the file a list may).
REPEATED = ("api_key", "cors_origin", "served_model_name")
_BUDGETS = (
    "paged_ssd_cache_dir",
    "paged_ssd_cache_max_size",
    "cache_write_policy",
    "cache_ttl",
    "hot_cache_max_size",
    "max_kv_cache_memory",
    "max_process_memory",
    "max_concurrent_requests",
    "max_waiting_requests",
    "max_stall_s",
    "kv_bits",
    "block_size",
    "exact",
)
_AUTO_HOT_SHARE, _AUTO_HOT_MOST = 10, 8 * GB
_AUTO_KV_SHARE = 40
_AUTO_PROCESS_SHARE = 90


# The options that are sizes, and what "auto" means for each ("" where there is no auto).
_SIZES = {
    "paged_ssd_cache_max_size": "",
    "hot_cache_max_size": f"{_AUTO_HOT_SHARE}% of RAM, at most {format_size(_AUTO_HOT_MOST)}",
    "max_kv_cache_memory": f"{_AUTO_KV_SHARE}% of RAM",
    "max_process_memory": f"{_AUTO_PROCESS_SHARE}% of RAM",
    "max_request_size": "",
}


def default_home() -> Path:
    """Where models, the settings file and the like live: OMLX_HOME, else ~/.omlx."""
    return home_folder(os.environ)


def home_folder(environ: Mapping[str, str]) -> Path:
    """`default_home` for another environment."""
    text = environ.get("OMLX_HOME") or "~/.omlx"
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:  # ~nobody
        raise SettingError(f"OMLX_HOME {quoted(text)}: {error}") from None


def _option(default: Any, metavar: str, text: str, **limits: Any) -> Any:
    return Field(default, description=text, json_schema_extra={"metavar": metavar}, **limits)


class Given(NamedTuple):
    """A value as somebody wrote it, the name it was written under (`--port`, ...), and where."""

    text: str
    label: str
    source: Literal["flag", "environment", "settings.json"]


class Row(NamedTuple):
    """One setting for display: secrets masked, sizes readable."""

    name: str
    value: str
    source: str


class Settings(BaseModel):
    """The values in force; sizes are bytes, durations seconds.

    `Settings.load` reads flags, environment and file; the constructor takes only what it is
    given (sizes as bytes or text) and defaults, and raises pydantic's ValidationError.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)

    home: Path = Field(default_factory=default_home)  # from OMLX_HOME only: the file lies inside it
    models: dict[str, ModelOptions] = Field(default_factory=dict)  # from the file only

    model: str | None = _option(
        None, "NAME", "Model to serve: a name or a folder. Without it every model under the home folder, on first use."
    )
    adapter_path: Path | None = _option(
        None, "DIR", "Folder of a LoRA adapter, as mlx-lm trains them, for the model of --model."
    )
    served_model_name: tuple[str, ...] | None = _option(
        None,
        "NAME",
        "Another name of the model of --model; may be repeated. Its cache is the same under every name.",
    )
    default_model: str | None = _option(
        None,
        "NAME",
        "Model that answers requests for a name that is not served, such as the claude-haiku names that Claude Code "
        "uses for background requests. Without it they get a 404.",
    )
    max_model_len: int | None = _option(
        None,
        "TOKENS",
        "Context length of the models that write text, prompt and answer together, instead of what their files say.",
        ge=1,
        lt=1 << 31,
    )
    generation_config: GenerationConfigUse = _option(
        "auto",
        "|".join(("auto", "none")),
        "auto: where a request does not set temperature, top_p, top_k, min_p or repetition_penalty, the model's "
        "generation_config.json does. none: the API's defaults apply.",
    )
    host: str = _option("127.0.0.1", "HOST", "Address to listen on.")
    port: int = _option(8000, "PORT", "Port to listen on; 0 takes a free one.", ge=0, le=65535)
    paged_ssd_cache_dir: Path | None = _option(
        None, "DIR", "Folder of the SSD tier. The tier is off unless this is given."
    )
    paged_ssd_cache_max_size: int = _option(
        "100GB", "SIZE", "Most that the SSD tier keeps, as 200GB or as 20% of the disk that holds it; 0 turns it off."
    )
    cache_write_policy: WritePolicy = _option(
        "through",
        "|".join(("through", "back")),
        "When a block's file is written. through: soon after it was computed. back: when it leaves RAM and when the "
        "server stops, which spares the SSD; without a RAM tier it is through.",
    )
    cache_ttl: int = _option(
        "off",
        "DURATION",
        "Blocks that were not used for that long are deleted in RAM and on disk, as 7d, 12h or 30m; "
        "0 or off keeps them until room is needed.",
    )
    hot_cache_max_size: int = _option(
        "auto",
        "SIZE",
        "Stored blocks kept in RAM, as 4GB or as 20% of RAM; never a limit for running requests; 0 turns the tier off. "
        f"auto: {_AUTO_HOT_SHARE}% of RAM, at most {format_size(_AUTO_HOT_MOST)}.",
    )
    max_kv_cache_memory: int = _option(
        "auto",
        "SIZE",
        "KV of running requests, padding of batches included, as 8GB or as 20% of RAM; "
        f"requests over it wait or are refused. auto: {_AUTO_KV_SHARE}% of RAM.",
        gt=0,
    )
    max_process_memory: int = _option(
        "auto",
        "SIZE",
        "Memory of the whole process, as 16GB or as 80% of RAM, beyond which stored blocks leave RAM; "
        f"0 sets no limit. auto: {_AUTO_PROCESS_SHARE}% of RAM.",
    )
    kv_bits: int | None = _option(
        None,
        "8|4",
        "Keep the KV of plain attention layers quantised, in RAM and in the cache: a half or a quarter of the bytes, "
        "and slightly other answers. Refused for models that cannot work with it.",
    )
    block_size: int = _option(64, "TOKENS", "Tokens of a stored block, a multiple of 8.", ge=8, le=4096, multiple_of=8)
    max_concurrent_requests: int = _option(16, "N", "Requests that run at the same time.", ge=1, le=4096)
    max_waiting_requests: int = _option(64, "N", "Requests that may wait for their turn; more get a 503.", ge=0)
    exact: Exact = _option(
        "auto",
        "|".join(("auto", "on", "strict", "off")),
        "Equal answers to the last bit from RAM, SSD and without a cache. strict: also recompute the KV of generated "
        "tokens. auto: on for the CPU.",
    )
    max_stall_s: float = _option(
        0.5, "SECONDS", "Longest wait of a running stream for another's prompt.", gt=0, le=60, allow_inf_nan=False
    )
    api_key: SecretStr | None = _option(
        None,
        "KEY",
        "Key that every route but /health, /ready and those under /admin asks for; may be repeated. Better given by "
        "the environment (commas between several) or by --api-keys-file.",
    )
    api_keys_file: Path | None = _option(
        None,
        "FILE",
        "More API keys, one per line: NAME: KEY, optionally followed by admin (it also opens /admin), requests=N and "
        "cache_salt=auto or none. Read again when it changes.",
    )
    max_requests_per_key: int = _option(
        0, "N", "Requests of one API key at the same time; more get a 429. 0 sets no limit.", ge=0
    )
    api_key_cache_salt: KeyCacheSalt = _option(
        "none",
        "|".join(("none", "auto")),
        "auto: each API key has a cache of its own. none: keys share what their requests have in common.",
    )
    admin_key: SecretStr | None = _option(
        None,
        "KEY",
        "Key for the routes under /admin, different from every API key. Without it, and with API keys, they need a key "
        "that its file marks admin; without any keys they are limited to localhost.",
    )
    allow_remote_images: bool = _option(
        False,
        "",
        "Whether requests may name images on the web, which the server then fetches (public hosts).",
    )
    allow_local_images: Path | None = _option(
        None, "DIR", "Folder from which requests may name images by path or file: URL; none without it."
    )
    allow_unauthenticated: bool = _option(
        False,
        "",
        "Confirms that everyone who can reach --host may use the server without an API key: no warning at start.",
    )
    cors_origin: tuple[str, ...] | None = _option(
        None,
        "ORIGIN",
        "Web pages that may use the server from a browser, as https://chat.example.com; may be repeated. "
        "Without it none may.",
    )
    max_request_size: int = _option("64MB", "SIZE", "Largest body of a request; a larger one gets a 413.", gt=0)
    log_level: LogLevel = _option("info", "|".join(("debug", "info", "warning", "error")), "What is logged.")

    _given: dict[str, Given] = PrivateAttr(default_factory=dict)
    _warnings: tuple[str, ...] = PrivateAttr(default=())

    @classmethod
    def load(cls, flags: Mapping[str, str | None] | None = None, environ: Mapping[str, str] | None = None) -> Self:
        """The settings in force. `flags` maps fields to the text of their flags, None where not given.

        Raises SettingError, one line that names the flag (or variable, or key of the file) and
        the text given. What is odd but harmless is in `warnings`.
        """
        env = os.environ if environ is None else environ
        home = home_folder(env)
        in_file, models, warnings = _from_file(home / "settings.json")
        given = in_file | _from_environment(env) | _from_flags(flags or {})
        values: dict[str, Any] = {name: value.text for name, value in given.items()}
        try:
            settings = cls(home=home, models=models, **values)
        except ValidationError as error:
            raise SettingError(_one_line(error, given)) from None
        settings._given, settings._warnings = given, warnings
        return settings

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any, info: ValidationInfo) -> Any:
        shown = quoted(MASK if info.field_name in _SECRETS else value)
        if isinstance(value, bool) and not is_switch(str(info.field_name)):
            raise ValueError(f"{shown} is true or false, not a value of this setting")
        if isinstance(value, str) and not value.strip():
            raise ValueError(f"{shown} is empty")
        if isinstance(value, str) and any(unicodedata.category(char) == "Cc" for char in value):
            raise ValueError(f"{shown} holds control characters")
        return value

    @field_validator("cors_origin", mode="before")
    @classmethod
    def _origins(cls, value: Any) -> Any:
        return tuple(map(_origin, value.split(","))) if isinstance(value, str) else value

    @field_validator(
        "exact", "log_level", "cache_write_policy", "api_key_cache_salt", "generation_config", mode="before"
    )
    @classmethod
    def _any_case(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @field_validator(*_SIZES, mode="before")
    @classmethod
    def _bytes(cls, value: Any, info: ValidationInfo) -> int:
        name = str(info.field_name)
        auto = _auto_size(name) if str(value).strip().lower() == "auto" else None
        if auto is not None:
            return auto
        # The disk is looked at only where a percentage asks for it.
        whole = _whole(name, info.data) if str(value).strip().endswith("%") else None
        return parse_size(value, percent_of=whole)

    @field_validator("cache_ttl", mode="before")
    @classmethod
    def _seconds(cls, value: Any) -> int:
        return parse_duration(value, off=True)

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return tuple(dict.fromkeys(value.replace(",", " ").split())) if isinstance(value, str) else value

    @field_validator("adapter_path", "served_model_name", mode="after")
    @classmethod
    def _has_its_model(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and info.data.get("model") is None:
            shown = quoted(", ".join(value) if isinstance(value, tuple) else value)
            raise ValueError(f"{shown} is for one model: --model has to name it")
        return value

    @field_validator("kv_bits")
    @classmethod
    def _known_bits(cls, value: int | None) -> int | None:
        if value not in (None, 8, 4):
            raise ValueError(f"{quoted(value)} must be 8 or 4")
        return value

    @field_validator("home", "adapter_path", "paged_ssd_cache_dir", "api_keys_file", "allow_local_images")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        if value is None:
            return None
        try:
            return value.expanduser().absolute()
        except RuntimeError as error:  # ~nobody
            raise ValueError(f"{quoted(value)}: {error}") from None

    @field_validator(*_SECRETS)
    @classmethod
    def _fits_in_a_header(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        key = value.get_secret_value() if value else ""
        if not key.isascii() or " " in key:
            raise ValueError(f'"{MASK}" must be ASCII without spaces')
        if info.field_name == "api_key" and "" in _listed(value):
            raise ValueError(f'"{MASK}" must not hold an empty key')
        return value

    @field_validator("admin_key")
    @classmethod
    def _is_no_api_key(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if value is not None and value.get_secret_value() in _listed(info.data.get("api_key")):
            raise ValueError(f'"{MASK}" must be another key than the API key')
        return value

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys that options give; `access.keys` has those of the file as well."""
        return _listed(self.api_key)

    @property
    def asks_for_key(self) -> bool:
        return self.api_key is not None or self.api_keys_file is not None

    @property
    def models_dir(self) -> Path:
        """The folder that holds a folder for each model."""
        return self.home / "models"

    @property
    def settings_file(self) -> Path:
        return self.home / "settings.json"

    @property
    def ssd_on(self) -> bool:
        """Whether there is an SSD tier: a folder is given and its limit is not 0."""
        return self.paged_ssd_cache_dir is not None and self.paged_ssd_cache_max_size > 0

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line for each thing that was ignored while loading."""
        return self._warnings

    def model_options(self) -> ModelOptions:
        """What flags and the like say of all models, or of the only one."""
        return ModelOptions(
            aliases=self.served_model_name or (),
            max_model_len=self.max_model_len,
            generation_config=self.generation_config,
        )

    def scheduler_config(self) -> "SchedulerConfig":
        """What the scheduler and its cache stack are built from; `exact` auto is decided here."""
        # Imported here because it loads MLX, which `omlx settings` and a refused flag need not.
        from omlx.scheduler import scheduler_config  # noqa: PLC0415

        return scheduler_config(
            exact=self.exact,
            block_size=self.block_size,
            hot_cache_max_size=self.hot_cache_max_size,
            paged_ssd_cache_dir=self.paged_ssd_cache_dir,
            max_paged_ssd_cache_size=self.paged_ssd_cache_max_size,
            cache_write_policy=self.cache_write_policy,
            cache_ttl=self.cache_ttl,
            max_concurrent_requests=self.max_concurrent_requests,
            max_waiting_requests=self.max_waiting_requests,
            max_kv_cache_memory=self.max_kv_cache_memory,
            max_process_memory=self.max_process_memory,
            max_stall_s=self.max_stall_s,
            kv_bits=self.kv_bits,
        )

    def resolve_sources(self) -> dict[str, str]:
        """Where each field's value came from: "flag", "environment", "settings.json", "default", or
        "argument" of the constructor.
        """
        return {name: self._source(name) for name in option_fields()}

    def rows(self) -> list[Row]:
        """Every option with its value and source, in the order of declaration, then the options of single models."""
        rows = [Row(option_name(name), self._shown(name), self._source(name)) for name in option_fields()]
        return rows + [
            Row(f"models: {name}", options.model_dump_json(exclude_defaults=True), "settings.json")
            for name, options in self.models.items()
        ]

    def describe(self) -> list[str]:
        """A line for each budget in force and where it came from, for the start of the server."""
        return [f"{option_name(name)}: {self._shown(name)} [{self._source(name)}]" for name in _BUDGETS]

    def _source(self, name: str) -> str:
        if name in self._given:
            return self._given[name].source
        return "argument" if name in self.model_fields_set else "default"

    def _shown(self, name: str) -> str:
        value = getattr(self, name)
        if isinstance(value, SecretStr):
            return MASK
        if name in _SIZES:
            return format_size(value) + self._how(name)
        if isinstance(value, tuple):
            return ", ".join(value)
        if name == "cache_ttl":
            return format_duration(value) if value else "off"
        if name == "paged_ssd_cache_dir" and not self.ssd_on:
            return f"{value or 'none'} (SSD tier off)"
        return "none" if value is None else f"{value} s" if name.endswith("_s") else str(value)

    def _how(self, name: str) -> str:
        """How a size that is not written as bytes was found, in brackets."""
        default = type(self).model_fields[name].default
        unset = "" if name in self.model_fields_set else str(default)
        text = (self._given[name].text if name in self._given else unset).strip().lower()
        if text == "auto":
            return f" (auto: {_SIZES[name]})"
        if text.endswith("%"):
            return f" ({text} of {format_size(_whole(name, {'paged_ssd_cache_dir': self.paged_ssd_cache_dir}))})"
        return ""


def _auto_size(name: str) -> int | None:
    if name == "hot_cache_max_size":
        return min(total_memory() * _AUTO_HOT_SHARE // 100, _AUTO_HOT_MOST)
    if name == "max_kv_cache_memory":
        return total_memory() * _AUTO_KV_SHARE // 100
    if name == "max_process_memory":
        return total_memory() * _AUTO_PROCESS_SHARE // 100
    return None


def _whole(name: str, data: Mapping[str, Any]) -> int:
    """What a percentage of this size is of, in bytes: the disk of the SSD tier, or RAM."""
    if name != "paged_ssd_cache_max_size":
        return total_memory()
    folder = data.get("paged_ssd_cache_dir") or data.get("home") or default_home()
    try:
        return total_disk(folder)
    except OSError as error:
        raise ValueError(f"cannot be a share of the disk of {quoted(folder)}: {error.strerror or error}") from None


def _listed(keys: SecretStr | None) -> tuple[str, ...]:
    return tuple(keys.get_secret_value().split(",")) if keys is not None else ()


def _origin(text: str) -> str:
    """An origin as browsers write it. Raises ValueError."""
    found = re.fullmatch(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?/?", text.strip().lower())
    if found is None:
        raise ValueError(f"{quoted(text)} is not an origin (examples: https://chat.example.com, http://localhost:3000)")
    scheme, host, port = found.groups(default="")
    return f"{scheme}://{host}{'' if (scheme, port) in _USUAL_PORTS else port}"


_USUAL_PORTS = (("http", ":80"), ("https", ":443"))


def option_fields() -> list[str]:
    """The fields that are options, in the order of declaration."""
    return [name for name in Settings.model_fields if name not in ("home", "models")]


def option_name(field: str) -> str:
    """The field's name as users know it: `max_stall_s` without its unit."""
    return field.removesuffix("_s")


def flag_name(field: str) -> str:
    return "--" + option_name(field).replace("_", "-")


def variable_name(field: str) -> str:
    return "OMLX_" + option_name(field).upper()


def flag_help(field: str) -> tuple[str, str]:
    """The help text of a flag, with its default, and the word that stands for its value."""
    info = Settings.model_fields[field]
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    default = "" if info.default is None else f" Default: {info.default}."
    return f"{info.description}{default}", str(extra["metavar"])


def is_switch(field: str) -> bool:
    """Whether an option is true or false: its flag takes no value."""
    return Settings.model_fields[field].annotation is bool


def usage_hint(host: str, port: int, model: str, api_key_set: bool, kind: str = "text") -> str:
    """A curl line and, for a model that writes text, a Python snippet that talk to a running server as they stand."""
    base = f"http://{reachable(host)}:{port}/v1"
    path, body = _example(model, kind)
    # In single quotes for the shell; a quote inside a JSON string may be written as an escape.
    data = json.dumps(body).replace("'", "\\u0027")
    bearer = ' -H "Authorization: Bearer $OMLX_API_KEY"' if api_key_set else ""
    lines = ["# OMLX_API_KEY: the key that this server was given"] if api_key_set else []
    lines += [f"curl {base}/{path} -H 'Content-Type: application/json'{bearer} -d '{data}'"]
    return "\n".join(lines + ([] if kind in ("embedding", "rerank") else _python_hint(base, body, api_key_set)))


def _example(model: str, kind: str) -> tuple[str, dict[str, Any]]:
    """A path and a body that suit a kind of model."""
    question = "What is the capital of France?"
    if kind == "embedding":
        return "embeddings", {"model": model, "input": question}
    if kind == "rerank":
        return "rerank", {"model": model, "query": question, "documents": ["Paris is its capital.", "The sky is blue."]}
    # Greedy and bounded: a small model that samples freely may ramble on to the end of its context.
    messages = [{"role": "user", "content": question}]
    return "chat/completions", {"model": model, "messages": messages, "temperature": 0, "max_tokens": 100}


def _python_hint(base: str, body: dict[str, Any], api_key_set: bool) -> list[str]:
    key = 'os.environ["OMLX_API_KEY"]' if api_key_set else '"none"'
    return [
        "",
        "# Python: pip install openai",
        *(["import os"] if api_key_set else []),
        "from openai import OpenAI",
        f"client = OpenAI(base_url={json.dumps(base)}, api_key={key})",
        f"answer = client.chat.completions.create(model={json.dumps(body['model'])}, temperature=0, max_tokens=100,",
        f"    messages={json.dumps(body['messages'])})",
        "print(answer.choices[0].message.content)",
    ]


def reachable(host: str) -> str:
    """An address to connect to for one to listen on."""
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
    host = everywhere.get(host, host)
    return f"[{host}]" if ":" in host else host


def _from_flags(flags: Mapping[str, str | None]) -> dict[str, Given]:
    return {name: Given(text, flag_name(name), "flag") for name, text in flags.items() if text is not None}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    variables = {name: variable_name(name) for name in option_fields()}
    return {
        name: Given(environ[variable], variable, "environment")
        for name, variable in variables.items()
        if variable in environ
    }


def _from_file(path: Path) -> tuple[dict[str, Given], dict[str, ModelOptions], tuple[str, ...]]:
    """The values of the settings file by field, the options of models, and a warning for each key that is neither."""
    fields = {option_name(field): field for field in option_fields()}
    given: dict[str, Given] = {}
    models: dict[str, ModelOptions] = {}
    warnings: list[str] = []
    for key, value in _read_file(path).items():
        if key == "models":
            models = model_options(value, f'{path}: "models"')
        elif key not in fields:
            close = difflib.get_close_matches(key.lower().replace("-", "_"), [*fields, "models"], n=1)
            hint = f' (did you mean "{close[0]}"?)' if close else ""
            warnings.append(f"{path}: {quoted(key)} is not a setting{hint}; ignored")
        elif fields[key] in REPEATED and isinstance(value, list) and all(isinstance(item, str) for item in value):
            given[fields[key]] = Given(",".join(value), f'{path}: "{key}"', "settings.json")
        elif isinstance(value, bool) and is_switch(fields[key]):
            given[fields[key]] = Given(str(value).lower(), f'{path}: "{key}"', "settings.json")
        elif not isinstance(value, str | None):
            raise SettingError(f"{path}: {quoted(key)} {json.dumps(value)[:80]} must be a text or a number")
        elif value is not None:
            given[fields[key]] = Given(value, f'{path}: "{key}"', "settings.json")
    return given, models, tuple(warnings)


def _read_file(path: Path) -> dict[str, Any]:
    """The object in the settings file, {} if there is no file. Numbers stay the text they are, but for "models"."""
    try:
        text = path.read_text("utf-8-sig")
        # As text, 1e3 in the file gets the same verdict as 1e3 in a flag.
        data = json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
        if isinstance(data, dict) and "models" in data:
            data["models"] = json.loads(text)["models"]
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} cannot be read: {error}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise SettingError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise SettingError(f'{path} must hold one JSON object, such as {{"port": 8000}}')
    return data


def _one_line(error: ValidationError, given: Mapping[str, Given]) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    name = str(first["loc"][0])
    label, text = (given[name].label, given[name].text) if name in given else (name, "")
    if first["type"] == "value_error":
        return f"{label} {first['ctx']['error']}"
    shown = MASK if name in _SECRETS else text
    return f"{label} {quoted(shown)} {first['msg'].removeprefix('Input ')}"
