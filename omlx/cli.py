"""The command line: `omlx serve`, `pull`, `import`, `models`, `doctor`, `cache`, `settings`.

The flags of `serve` are made from `Settings`, where each option is declared. They arrive here as
text and are checked there, so a flag gets the same verdict as the environment and the file.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from omlx import __version__
from omlx.access.connections import unchanged_limits
from omlx.access.keys import read_keys
from omlx.errors import ModelError, OmlxError, SettingError
from omlx.model.folder import MICRO_VLM, find_model, read_adapter, scan_models, shipped_models
from omlx.model.progress import console_progress
from omlx.settings import REPEATED, Settings, default_home, flag_help, flag_name, is_switch, option_fields
from omlx.sizes import format_size

STARTER, EMBEDDER = "smollm2-135m", "all-minilm-l6-v2"

app = typer.Typer(
    name="omlx",
    help="Serve MLX models over an OpenAI-compatible API, with a prefix cache in RAM and on SSD.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its boxes cut long flags short
)


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns its exit status: 0, 1 after an error, 2 for a wrong value or usage."""
    try:
        app(argv, prog_name="omlx")
    except SettingError as error:
        return _complain(error, 2)
    except OmlxError as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _complain(error: OmlxError, status: int) -> int:
    sys.stderr.write("omlx: " + " ".join(str(error).split("\n")) + "\n")
    return status


def _heavy(target: str) -> Callable[..., Any]:
    """The function that "package.module:function" names, imported now.

    The only import that is not at the top: what these functions need (MLX, the web server) takes
    seconds to load, and `omlx --help` or a refused flag should not wait for it.
    """
    module, function = target.split(":")
    with unchanged_limits():
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _with_settings(
    command: Callable[..., None], fields: Sequence[str] = (), more: Sequence[inspect.Parameter] = ()
) -> Callable[..., None]:
    """`command(settings)` as a function with one keyword for each option of Settings, for typer to read.

    `fields` are the options that are flags of this command, if not all. `more` are flags of its own, which it
    gets as keywords.
    """
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_flag(name), annotation=_annotation(name))
        for name in fields or option_fields()
    ]

    def run(**given: Any) -> None:
        settings = Settings.load({option.name: _text(given.pop(option.name)) for option in options})
        for warning in settings.warnings:
            sys.stderr.write(f"omlx: {warning}\n")
        command(settings, **given)

    parameters = [*more, *options]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    vars(run)["__signature__"] = inspect.Signature(parameters)
    return run


def _annotation(field: str) -> Any:
    if is_switch(field):
        return bool | None
    return list[str] | None if field in REPEATED else str | None


def _text(given: str | bool | list[str] | None) -> str | None:
    """A flag as the settings take it: what was given several times has commas between."""
    if isinstance(given, bool):
        return str(given).lower()
    return (",".join(given) if given else None) if isinstance(given, list) else given


def _flag(field: str) -> Any:
    text, metavar = flag_help(field)
    name = flag_name(field)
    if is_switch(field):
        return typer.Option(None, f"{name}/--no-{name[2:]}", help=text, show_default=False)
    return typer.Option(None, name, help=text, metavar=metavar, show_default=False)


def serve(settings: Settings) -> None:
    """Serve models over HTTP until stopped (Ctrl-C)."""
    read_keys(settings)
    if settings.model is not None:
        find_model(settings.model, settings.home)
        if settings.adapter_path is not None:
            read_adapter(settings.adapter_path)
    elif not (scan := scan_models(settings.home)).models:
        unreadable = f" (cannot be read: {'; '.join(scan.unreadable)})" if scan.unreadable else ""
        fetch = f"`omlx pull {STARTER}` fetches a small one (93 MB)"
        raise ModelError(f"no model under {settings.models_dir}{unreadable}; {fetch}")
    raise typer.Exit(_heavy("omlx.server:serve")(settings))


app.command("serve")(_with_settings(serve))
app.command("run", help="The same as serve.")(_with_settings(serve))


@app.command()
def pull(
    name: Annotated[
        str, typer.Argument(help=f"{STARTER}, {EMBEDDER}, {MICRO_VLM}, or ORG/NAME on the Hugging Face hub.")
    ],
) -> None:
    """Fetch a model into the home folder."""
    fetch = "omlx.model.hub:pull_from_hub" if "/" in name else "omlx.model.starter:pull"
    with console_progress() as progress:
        folder = _heavy(fetch)(name, default_home(), progress)
    _say(f"{name} is ready in {folder}")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE.gguf", help="A GGUF file of a llama-architecture model.")],
    name: Annotated[str | None, typer.Option(help="Name of the model; without it the file's own.")] = None,
) -> None:
    """Convert a GGUF file into a model folder."""
    with console_progress() as progress:
        folder = _heavy("omlx.model.starter:import_gguf")(file, default_home(), name, progress)
    _say(f"{file.name} is ready in {folder}")


@app.command()
def models() -> None:
    """List the models in the home folder, and those that come with omlx."""
    found, unreadable = scan_models(default_home())
    for line in unreadable:
        sys.stderr.write(f"omlx: model folder cannot be read: {line}\n")
    if not found:
        _say(f"No models in {default_home() / 'models'}. `omlx pull {STARTER}` fetches a small one (93 MB).")
    names = {model.name for model in found}
    found += [model for model in shipped_models() if model.name not in names]
    if not found:
        return
    table = Table("model", "size", "folder")
    for model in found:
        table.add_row(escape(model.name), format_size(model.size_bytes), escape(str(model.path)))
    Console().print(table)


def doctor(settings: Settings) -> None:
    """Show and measure what omlx runs on; warn of what is wrong."""
    raise typer.Exit(_heavy("omlx.doctor:run")(settings))


app.command("doctor")(_with_settings(doctor))


cache = typer.Typer(
    name="cache", help="Look into the cache folder, check it, empty it; a server may be running.", no_args_is_help=True
)
app.add_typer(cache)


def _own_flag(name: str, annotation: Any, flag: str, text: str, metavar: str | None = None) -> inspect.Parameter:
    option = typer.Option(False if annotation is bool else None, flag, help=text, metavar=metavar, show_default=False)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)


_MODEL = _own_flag("model", str | None, "--model", "This model's blocks only.", "NAME")
_JSON = _own_flag("as_json", bool, "--json", "Print JSON, sizes in bytes.")
_LIMIT = _own_flag("limit", int | None, "--limit", "So many rows; 0 shows all. Default: 100, all with --json.", "N")
_URL = _own_flag("url", str | None, "--url", "Where the server answers that works on the folder.", "URL")

_OLDER = _own_flag(
    "older_than", str | None, "--older-than", "Only blocks not used for that long, as 7d, 12h or 30m.", "DURATION"
)
_CONVERSATION = _own_flag(
    "conversation",
    Path | None,
    "--conversation",
    "Only the blocks of the conversation in this file, a JSON body as for chat completions, and of what continues it; "
    "what other conversations share stays. Needs a running server.",
    "FILE",
)


def _cache_command(name: str, target: str, text: str, *more: inspect.Parameter, fields: Sequence[str] = ()) -> None:
    def command(settings: Settings, **given: Any) -> None:
        raise typer.Exit(_heavy(f"omlx.cache_command:{target}")(settings, **given))

    flags = ("paged_ssd_cache_dir", *fields)
    cache.command(name, help=text)(_with_settings(command, flags, (_MODEL, _JSON, *more)))


_cache_command(
    "stats", "stats", "Show blocks, tokens and bytes of each model; those in RAM too if a server works on the folder.",
    _URL, fields=("paged_ssd_cache_max_size", "host", "port", "admin_key", "api_keys_file"),
)  # fmt: skip
_cache_command("list", "list_blocks", "List the blocks, the last used first.", _LIMIT)
_cache_command("verify", "verify", "Compare index and files, check every checksum; exit 1 and a line for each problem.")
_cache_command(
    "clear", "clear", "Delete blocks. If a server works on the folder, it is asked to do it.",
    _URL, _OLDER, _CONVERSATION,
    fields=("host", "port", "admin_key", "api_keys_file"),
)  # fmt: skip


def settings_(settings: Settings) -> None:
    """Show each setting in force and where it came from."""
    table = Table(Column("setting", no_wrap=True), "value", "from")
    for row in settings.rows():
        table.add_row(row.name, escape(row.value), escape(row.source))
    Console().print(table)
    _say(f"settings.json: {settings.settings_file}{'' if os.path.exists(settings.settings_file) else ' (not there)'}")


app.command("settings")(_with_settings(settings_))


def _version(asked: bool) -> None:
    if asked:
        _say(f"omlx {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _say(text: str) -> None:
    # Not through rich, which would break a path at the edge of the terminal.
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
