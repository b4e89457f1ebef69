"""What stands for a model's content: a hash of all its weights, computed once for as long as the files stay the same.

sha256, because cached KV is used again wherever two fingerprints are equal: nobody may be able to make two models that
have the same one. blake3 would be faster on one thread, and a dependency more; several threads of hashlib, which uses
the processor's own instructions and does not hold the interpreter, are faster than the files are read.
"""

import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from omlx.errors import ModelError
from omlx.model.folder import Adapter
from omlx.model.json_file import read_bytes, read_object
from omlx.model.progress import Progress, silent
from omlx.model.weights import WeightFile, identity_of
from omlx.sizes import GB, format_size

log = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 20
"""A file's digest is the sha256 of the digests of its chunks, so that several threads can work on one file.

Part of the fingerprint's definition (docs/FORMAT.md)."""

_READ_BYTES = 4 << 20
_MOST_THREADS = 4
_SAY_EVERY_S = 10.0
# A file that changed this recently may change again within one tick of its file system's clock: it gets no record.
_SETTLED_NS = 2_000_000_000
# Hashing less takes no longer than finding out what has changed: no record either.
_WORTH_BYTES = 64 << 20


def fingerprint(
    path: Path, files: Sequence[WeightFile], adapter: Adapter | None = None, hashes: "WeightHashes | None" = None
) -> bytes:
    """32 bytes that stand for the content of a model: its config and all of its weights, not names or times.

    sha256 over length-prefixed parts: config.json (and hf_quant_config.json, which mlx-lm reads too), the number of
    weight files, the digest of each in name order; then the same of an adapter. The tokenizer is not part of it: cache
    keys are made of token ids. `hashes` has been started with these files, the adapter's among them; without it they
    are hashed now. Raises ModelError.
    """
    if hashes is None:
        with WeightHashes([*files, *([adapter.weights] if adapter else [])]) as own:
            return fingerprint(path, files, adapter, own)
    digest = hashlib.sha256(b"omlx model fingerprint 3")
    for name in ("config.json", "hf_quant_config.json"):
        file = path / name
        _add(digest, read_bytes(file) if os.path.isfile(file) else b"")
    _add(digest, len(files).to_bytes(8, "little"))
    for weights in files:
        _add(digest, hashes.digest(weights))
    _add(digest, b"" if adapter is None else b"adapter")
    if adapter is not None:
        _add(digest, adapter.config)
        _add(digest, hashes.digest(adapter.weights))
    return digest.digest()


def _add(digest: "hashlib._Hash", part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


class WeightHashes:
    """The digests of weight files: from a record where the file is unchanged, else computed by threads of its own.

    A context: computing starts when it is entered, so that it runs beside the loading of the same files, and what is
    not done is given up when it is left. `records` is the folder of records (None: none are kept), one for each model
    folder; not the model folder itself, so that a published one cannot bring digests along. `progress` gets the bytes
    done; long work is logged too, with `name`.
    """

    def __init__(
        self, files: Sequence[WeightFile], records: Path | None = None, progress: Progress = silent, name: str = ""
    ) -> None:
        self._files = list(files)
        self._records = records
        self._progress = progress
        self._name = name or "model"
        self._known: dict[Path, bytes] = {}
        self._chunks: dict[Path, list[Future[bytes]]] = {}
        self._lock = threading.Lock()
        self._done = self._total = 0
        self._started = self._said = self._ended = time.monotonic()
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        for folder in {file.path.parent for file in self._files}:
            self._known |= self._read_record(folder)
        rest = [file for file in self._files if file.path not in self._known]
        self._total = sum(file.size for file in rest)
        if rest:
            self._threads = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "omlx-hash")
            for file in rest:
                self._chunks[file.path] = [
                    self._threads.submit(self._chunk, file.path, start) for start in range(0, file.size, CHUNK_BYTES)
                ]
        return self

    def __exit__(self, *error: object) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def digest(self, file: WeightFile) -> bytes:
        """The digest of one of the files; waits for it.

        Raises ModelError if the file changed since its header was read: then the weights in memory may be others.
        """
        if file.path not in self._known:
            try:
                parts = [chunk.result() for chunk in self._chunks[file.path]]
                unchanged = identity_of(file.path) == file.identity
            except OSError as error:
                raise ModelError(f"{file.path}: {error.strerror or error}") from error
            if not unchanged:
                raise ModelError(f"{file.path}: changed while it was being loaded; load the model again")
            self._known[file.path] = hashlib.sha256(b"".join(parts)).digest()
            if all(each.path in self._known for each in self._files):
                self._finished()
        return self._known[file.path]

    def _chunk(self, path: Path, start: int) -> bytes:
        digest, buffer = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
        left = CHUNK_BYTES
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            while left and (count := file.readinto(buffer[: min(left, _READ_BYTES)])):
                digest.update(buffer[:count])
                left -= count
        self._report(CHUNK_BYTES - left)
        return digest.digest()

    def _report(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            done, now = self._done, time.monotonic()
            self._ended = now
            say = now - self._said >= _SAY_EVERY_S
            self._said = now if say else self._said
            self._progress("hashing weights", done, self._total)
        if say:
            log.info("%s: hashed %s of %s of weights", self._name, format_size(done), format_size(self._total))

    # ---- records

    def _finished(self) -> None:
        if self._total < _WORTH_BYTES:
            return
        seconds = max(self._ended - self._started, 1e-9)
        log.info(
            "%s: hashed %s of weights in %.1f s (%.1f s per GB) while loading; not again unless they change",
            self._name, format_size(self._total), seconds, seconds / max(self._total / GB, 1e-9),
        )  # fmt: skip
        for folder in {file.path.parent for file in self._files}:
            self._write_record(folder)

    def _record_file(self, folder: Path) -> Path | None:
        name = hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:32]
        return None if self._records is None else self._records / f"{name}.json"

    def _read_record(self, folder: Path) -> dict[Path, bytes]:
        """Digests of the files in a folder that are as they were when the record was made."""
        record = self._record_file(folder)
        if record is None or not os.path.isfile(record):
            return {}
        try:
            entries: Any = read_object(record)["files"]
            found = {
                file.path: bytes.fromhex(entries[file.path.name]["sha256"])
                for file in self._files
                if file.path.parent == folder and entries.get(file.path.name, {}).get("identity") == [*file.identity]
            }
            return {path: digest for path, digest in found.items() if len(digest) == hashlib.sha256().digest_size}
        except (ModelError, ValueError, LookupError, TypeError, AttributeError):
            log.warning("record of weight hashes cannot be read, hashing again: %s", record)
            return {}

    def _write_record(self, folder: Path) -> None:
        record = self._record_file(folder)
        settled = time.time_ns() - _SETTLED_NS
        entries = {
            file.path.name: {"identity": [*file.identity], "sha256": self._known[file.path].hex()}
            for file in self._files
            if file.path.parent == folder and file.identity.ctime_ns <= settled
        }
        if record is None or not entries:
            return
        try:
            record.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=record.parent, suffix=".new", delete=False) as file:
                json.dump({"folder": str(folder.absolute()), "files": entries}, file, indent=1)
            os.replace(file.name, record)
        except OSError as error:
            log.warning("record of weight hashes cannot be written, the next load hashes again: %s (%s)", record, error)
