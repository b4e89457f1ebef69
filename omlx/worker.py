"""Work that nothing inside a process can stop, done in child processes that are killed when it takes too much.

A template that loops or a grammar that compiles for ever cannot be interrupted in a thread. A child here is a fresh
interpreter that runs one module (see `serve`), takes a request at a time over pipes, and ends when its parent does.
"""

import atexit
import codecs
import contextlib
import io
import os
import pickle
import queue
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

import psutil

from omlx.errors import Overloaded

# For starting a child, and for one request whatever its processor time is: a machine under load may be this slow.
_START_S = 120.0
_WALL_S = 60.0
_POLL_S = 0.05
# A child that takes longer than this no longer counts as one of those that ordinary requests wait for.
_QUICK_S = 1.0
_QUICK = 2  # children at a time for each key, and as many again that take long
_SLOW = 2
_PROCESSES = 8
_IDLE = 2  # processes that wait for the next request

# Long texts pass the pipes in pieces of so many characters or bytes.
_PIECE = 256 << 10
_HEAD = struct.Struct("<cQ")
_DONE, _REFUSED, _MEMORY = b"d", b"r", b"m"


class Refused(Exception):
    """The work cannot be done as requested; the message says why."""


class LimitExceeded(Exception):
    """The work was stopped because it took too much time or memory; the message says which, with the limit."""


class WorkerPool:
    """Child processes that run `module`, started when they are needed. For any thread.

    A request may take `cpu_s` seconds of processor time and `memory` bytes beyond what the child needs itself.
    """

    def __init__(self, module: str, *, cpu_s: int, memory: int) -> None:
        self._module = module
        self._cpu_s = cpu_s
        self._memory = memory
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._busy: set[_Child] = set()
        self._stops = 0
        self._processes = threading.BoundedSemaphore(_PROCESSES)
        self._lanes: defaultdict[str, _Lane] = defaultdict(_Lane)
        _POOLS.append(self)

    def call(self, request: Any, key: str = "") -> str:
        """What the module's handler makes of `request`, plain values. Blocks.

        Requests of one `key` have their own share of the processes, and those that take long do not hold up the
        others. Raises Refused, LimitExceeded, and Overloaded if there is no process or the pool is stopped.
        """
        stops = self._stops
        with self._lock:
            lane = self._lanes[key]
        with lane.place() as place, self._processes:
            child = self._take(stops)
            try:
                answer = child.call(request, place.move_over)
            except BaseException:
                self._end(child)
                if self._stops != stops:
                    raise Overloaded("the server is stopping") from None
                raise
            self._give_back(child)
        status, text = answer
        if status == _REFUSED:
            raise Refused(text)
        return text

    def stop(self) -> None:
        """End all processes; calls that run or wait raise Overloaded. Later calls start new processes."""
        with self._lock:
            self._stops += 1
            idle, busy = [*self._idle], [*self._busy]
            self._idle.clear()
        for child in busy:
            child.kill()
        for child in idle:
            child.close()

    def _take(self, stops: int) -> "_Child":
        with self._lock:
            if self._stops != stops:
                raise Overloaded("the server is stopping")
            child = self._idle.pop() if self._idle else _Child(self._module, self._cpu_s, self._memory)
            self._busy.add(child)
        return child

    def _give_back(self, child: "_Child") -> None:
        with self._lock:
            self._busy.discard(child)
            keep = len(self._idle) < _IDLE and child.usable
            if keep:
                self._idle.append(child)
        if not keep:
            child.close()

    def _end(self, child: "_Child") -> None:
        child.close()
        with self._lock:
            self._busy.discard(child)


_POOLS: list[WorkerPool] = []


def stop_all() -> None:
    """End the processes of all pools; see WorkerPool.stop."""
    for pool in _POOLS:
        pool.stop()


atexit.register(stop_all)


class _Lane:
    """The places of one key: some for requests that take a moment, some for those that turned out to take long."""

    def __init__(self) -> None:
        self.quick = threading.BoundedSemaphore(_QUICK)
        self.slow = threading.BoundedSemaphore(_SLOW)

    def place(self) -> "_Place":
        return _Place(self)


class _Place(contextlib.AbstractContextManager["_Place"]):
    def __init__(self, lane: _Lane) -> None:
        self._lane = lane
        self._held = lane.quick

    def __enter__(self) -> "_Place":
        self._held.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.release()

    def move_over(self) -> None:
        """Leave the place to another request, if there is room among those that take long."""
        if self._held is self._lane.quick and self._lane.slow.acquire(blocking=False):
            self._held.release()
            self._held = self._lane.slow


class _Child:
    """One process. `usable`: whether it may be given another request."""

    def __init__(self, module: str, cpu_s: int, memory: int) -> None:
        self.usable = True
        self._memory = memory
        self._cpu_s = cpu_s
        self._base = 0
        # -P: a module in the current folder must not stand in for one of ours.
        command = [sys.executable, "-P", "-m", module, str(cpu_s), str(memory)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # Ctrl-C in a terminal is for the server
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},
            )
        except OSError as error:
            raise Overloaded(f"no worker process could be started: {error.strerror or error}") from None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._ready = False

    def call(self, request: Any, on_slow: Callable[[], None]) -> tuple[bytes, str]:
        """Status and text of the answer. Raises LimitExceeded and Overloaded; the child is to be killed then."""
        if not self._ready:
            self._await_start()
        data = _pickled(request)
        try:
            _write(self._stdin, _HEAD.pack(_DONE, sum(map(len, data))), *data)
        except OSError:
            raise self._ended() from None
        self._await_answer(on_slow)
        try:
            status, answer = _read_text(self._stdout)
        except EOFError:
            raise self._ended() from None
        if status == _MEMORY:
            raise LimitExceeded(self._too_large())
        return status, answer

    def kill(self) -> None:
        """End the process; for any thread. Who waits for its answer is told that it ended."""
        self.usable = False
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process and close its pipes, which nobody uses any more."""
        self.kill()
        self._stdin.close()
        self._stdout.close()

    def _await_start(self) -> None:
        try:
            if not self._readable(_START_S):
                raise EOFError
            _read(self._stdout)
        except EOFError:
            raise Overloaded("a worker process did not start; try again later") from None
        self._base = self._resident()
        self._ready = True

    def _await_answer(self, on_slow: Callable[[], None]) -> None:
        begun = time.monotonic()
        while not self._readable(_POLL_S):
            taken = time.monotonic() - begun
            if taken > _WALL_S:
                raise LimitExceeded(f"it took longer than {_WALL_S:.0f} s")
            if taken > _QUICK_S:
                on_slow()
            # The child's own limit is not kept by every system.
            if self._resident() > self._base + self._memory:
                raise LimitExceeded(self._too_large())

    def _readable(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def _resident(self) -> int:
        try:
            return int(psutil.Process(self._process.pid).memory_info().rss)
        except psutil.Error:
            return 0  # it has ended, which is noticed by reading from it

    def _ended(self) -> LimitExceeded:
        """Why the child closed its pipe."""
        code = self._process.wait()
        if code == -signal.SIGXCPU:
            return LimitExceeded(f"it took more than {self._cpu_s} s of processor time")
        # A library that gets no memory aborts.
        return LimitExceeded(f"it ran out of memory ({self._memory >> 20} MB are allowed) or crashed")

    def _too_large(self) -> str:
        return f"it needs more than {self._memory >> 20} MB of memory"


def _write(pipe: Any, *parts: bytes) -> None:
    for part in parts:
        view = memoryview(part)
        while view:
            view = view[pipe.write(view) :]


def _read(pipe: Any) -> tuple[bytes, bytes]:
    status, size = _HEAD.unpack(_exactly(pipe, _HEAD.size))
    return status, _exactly(pipe, size)


def _read_text(pipe: Any) -> tuple[bytes, str]:
    """The same for a text. It is decoded in pieces: millions of characters at once would hold the GIL."""
    status, size = _HEAD.unpack(_exactly(pipe, _HEAD.size))
    decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")
    texts = []
    while size:
        piece = _exactly(pipe, min(size, _PIECE))
        size -= len(piece)
        texts.append(decoder.decode(piece, final=not size))
    return status, "".join(texts)


def _exactly(pipe: Any, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = pipe.readinto(view)
        if not count:
            raise EOFError
        view = view[count:]
    return bytes(data)


class _Pickler(pickle.Pickler):
    """Writes long texts in pieces: encoding one of millions of characters at once would hold the GIL."""

    def persistent_id(self, value: Any) -> tuple[str, ...] | None:
        if type(value) is not str or len(value) <= _PIECE:
            return None
        return tuple(value[at : at + _PIECE] for at in range(0, len(value), _PIECE))


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> str:
        return "".join(pid)


class _Parts(list[bytes]):
    """A file that keeps what is written as it came."""

    def write(self, data: Any) -> int:
        self.append(bytes(data))
        return len(data)


def _pickled(value: Any) -> list[bytes]:
    """The pickle of a value, in parts of moderate size."""
    parts = _Parts()
    _Pickler(parts, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return parts


# ---- in the child


def serve(handle: Callable[[Any], str]) -> NoReturn:
    """Answer requests from the parent with `handle` until it closes the pipe; the main program of a child.

    `handle` raises Refused for what cannot be done.
    """
    cpu_s, memory = int(sys.argv[1]), int(sys.argv[2])
    requests = os.fdopen(os.dup(0), "rb", 0)
    answers = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # what libraries print must not get between answers
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    # A thread that always reads, so that a child at work notices that its parent has ended.
    threading.Thread(target=_receive, args=(requests, waiting), daemon=True).start()
    _limit_memory(memory)
    _write(answers, _HEAD.pack(_DONE, 0))
    while True:
        request = waiting.get()
        _limit_time(cpu_s)
        status, text = _handled(handle, request)
        data = text.encode("utf-8", "surrogatepass")
        _write(answers, _HEAD.pack(status, len(data)), data)
        if status == _MEMORY:
            os._exit(0)


def _receive(requests: BinaryIO, waiting: "queue.SimpleQueue[bytes]") -> None:
    try:
        while True:
            waiting.put(_read(requests)[1])
    except EOFError:
        os._exit(0)
    except MemoryError:
        os._exit(1)


def _handled(handle: Callable[[Any], str], request: bytes) -> tuple[bytes, str]:
    try:
        return _DONE, handle(_Unpickler(io.BytesIO(request)).load())
    except MemoryError:
        return _MEMORY, ""
    except Refused as error:
        return _REFUSED, str(error)
    # Nothing that the work raises may end the child without an answer, sys.exit included.
    except BaseException as error:
        return _REFUSED, f"{type(error).__name__}: {error}"


def _limit_memory(memory: int) -> None:
    """Where the system has such a limit: macOS accepts it without keeping to it."""
    if sys.platform == "linux":
        limit = psutil.Process().memory_info().vms + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_time(cpu_s: int) -> None:
    """The kernel ends the process after `cpu_s` more seconds of processor time, rounded up."""
    used = sum(os.times()[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 1 + cpu_s, resource.RLIM_INFINITY))
