"""Decoding processes of one host: started when needed, lent to one item at a time, ended at their limits.

    None ──lend──▶ lent ──item done──▶ idle ──lend──▶ lent
                    └──time, memory, crash──▶ ended

A process that is ended costs the next item a start of 0.3 s.
"""

import contextlib
import fcntl
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import msgspec

from triptych_common.domain.media_bounds import DecodingBounds
from triptych_common.runtime.liveness import run_delay_s
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.decoding import messages
from triptych_vllm_connector.decoding.messages import ReplyType

log = get_logger(__name__)

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 10.0
KEPT_SHARE = 4  # a process that keeps more than this part of its memory limit after an item is not kept
MAX_OUTPUT_BYTES = 1 << 30  # of decoded bytes at a time: a frame, an image, all samples of an audio file
# Only variables that programs need to start: no credentials beside a caller's bytes.
KEPT_VARIABLES = {"PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "PYTHONHOME", "PYTHONPATH"}
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP}


class MediaRefusedError(ValueError):
    """The item is not decoded, and the caller can change that. The text is shown to the caller."""


class DecoderError(ValueError):
    """A decoder failed on the item's bytes. The text quotes the decoder: for the log."""

    def __init__(self, detail: str, code: int) -> None:
        super().__init__(detail)
        self.code = code


class CoreWaits:
    """Seconds in which processes that decode for one item were ready to run and had no core."""

    def __init__(self) -> None:
        self._now_s: Callable[[], float] = lambda: 0.0

    def __call__(self) -> float:
        return self._now_s()

    def follow(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s


CORE_WAITS: ContextVar[CoreWaits] = ContextVar("core_waits")
"""Set by a caller that measures the time of its thread's work: the sessions of that thread tell it theirs."""


class _Process:
    """One child, with its socket and its lifeline."""

    def __init__(self, num_bytes: int) -> None:
        """Raises OSError: the machine has no process, memory or descriptor for it."""
        with contextlib.ExitStack() as opened:
            self._channel, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            opened.callback(self._channel.close)
            read_end, self._lifeline = os.pipe2(os.O_CLOEXEC)
            opened.callback(os.close, self._lifeline)
            try:
                arguments = (far.fileno(), read_end, num_bytes, MAX_OUTPUT_BYTES)
                self._child = subprocess.Popen(
                    [sys.executable, "-P", "-m", f"{__package__}.child", *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(far.fileno(), read_end),
                    env=_environment(),
                )
            finally:
                far.close()
                os.close(read_end)
            self._opened = opened.pop_all()
        self._poll = select.poll()
        self._poll.register(self._channel, select.POLLIN)
        self.end = weakref.finalize(self, _end, self._opened, self._child)
        self.tasks = Path(f"/proc/{self._child.pid}/task")

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, request: messages.DecodeRequest, files: tuple[int, ...] = ()) -> None:
        with contextlib.suppress(OSError):  # it has ended: the reply does not come
            socket.send_fds(self._channel, [messages.ENCODER.encode(request)], files)

    def try_receive(self, timeout_s: float) -> bytes | None:
        """Return a reply; None: none has come; empty: the process has ended."""
        if not self._poll.poll(max(timeout_s, 0.0) * 1000):
            return None
        try:
            return self._channel.recv(messages.MAX_BYTES)
        except ConnectionError:
            return b""

    def wait_ended(self) -> int:
        """Return the exit status, as `subprocess` has it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._child.wait(END_TIMEOUT_S)
        self._child.kill()
        return self._child.wait()


def _end(opened: contextlib.ExitStack, child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    opened.close()
    child.wait()


def _environment() -> dict[str, str]:
    environment = os.environ  # noqa: TID251 -- passed on to a program, not read
    kept = {
        name: value
        for name, value in environment.items()
        if name in KEPT_VARIABLES or name.startswith("OPENCV_")
    }
    return {**kept, "OPENBLAS_NUM_THREADS": "1"}  # numpy's threads have nothing to do there


class Session:
    def __init__(self, process: _Process, output: int, what: str, bounds: DecodingBounds) -> None:
        """`output`: memory that both processes map; `what`: the item's kind, as callers read it."""
        self._process = process
        self._output = output
        self._map: mmap.mmap | None = None
        self._what = what
        self.bounds = bounds
        self._started_at = time.monotonic()
        self._waited_before = self._waits_by_thread()
        self._known_wait_s = 0.0
        self.is_waiting = False  # for a reply: the process may be in a decoder
        CORE_WAITS.get(CoreWaits()).follow(self._waited_s)

    def ask(
        self, request: messages.DecodeRequest, expected: type[ReplyType], files: tuple[int, ...] = ()
    ) -> ReplyType:
        """Send a request and wait for its reply.

        Raises:
            MediaRefusedError: the item took too much time or memory, or crashed its decoder.
            DecoderError: the decoder failed on the item.
            MemoryError, OSError: the machine could not do it, now.
        """
        if self._left_s() <= 0:
            self._check_time()
        self.is_waiting = True
        self._process.send(request, files)
        while (packet := self._process.try_receive(self._left_s())) is None:
            self._check_time()
        if not packet:
            self._raise_ended(self._process.wait_ended())
        try:
            reply = messages.REPLIES.decode(packet)
        except msgspec.DecodeError as error:  # a child that a stranger's bytes have taken over: it is ended
            raise DecoderError(f"no reply: {error}", 0) from error
        self.is_waiting = False
        if isinstance(reply, messages.Failed):
            self._raise_failed(reply)
        if not isinstance(reply, expected):
            raise DecoderError(f"unexpected reply {type(reply).__name__}", 0)
        return reply

    def view(self, num_bytes: int) -> memoryview:
        """Return the first decoded bytes, in place: valid until the next request that decodes."""
        if self._map is None or len(self._map) < num_bytes:
            if os.fstat(self._output).st_size < num_bytes:
                raise DecoderError("fewer decoded bytes than the reply names", 0)
            self._map = mmap.mmap(self._output, 0, prot=mmap.PROT_READ)
        return memoryview(self._map)[:num_bytes]

    # ---- time ----------------------------------------------------------------------------------
    def _waits_by_thread(self) -> dict[str, float]:
        try:
            threads = list(self._process.tasks.iterdir())
        except OSError:
            return {}
        return {each.name: run_delay_s(each / "schedstat") for each in threads}

    def _waited_s(self) -> float:
        """Return the wait for a core of the thread that waited longest."""
        before = self._waited_before
        waits = self._waits_by_thread()
        return max((each - before.get(name, 0.0) for name, each in waits.items()), default=0.0)

    def _left_s(self) -> float:
        return self.bounds.timeout_s + self._known_wait_s - (time.monotonic() - self._started_at)

    def _check_time(self) -> None:
        """Grant the time that the process waited for a core. Raises MediaRefusedError: nothing is left."""
        self._known_wait_s = max(self._known_wait_s, self._waited_s())
        if self._left_s() <= 0:
            raise MediaRefusedError(f"the {self._what} takes too long to decode")

    # ---- failures ------------------------------------------------------------------------------
    def _raise_ended(self, status: int) -> None:
        log.warning("decoding process ended", what=self._what, status=status)
        if status == -signal.SIGXCPU:
            message = f"decoding the {self._what} took more than {self.bounds.cpu_s} s of CPU time"
            raise MediaRefusedError(message)
        if -status in _CRASHES:
            name = signal.Signals(-status).name
            raise MediaRefusedError(f"the decoder of the {self._what} crashed ({name})")
        raise MemoryError(f"the decoding process has ended: {status}")  # by the kernel, for want of memory

    def _raise_failed(self, failed: messages.Failed) -> None:
        if failed.why == "memory":
            limit_mib = self.bounds.num_bytes >> 20
            raise MediaRefusedError(f"decoding the {self._what} needs more than {limit_mib} MiB of memory")
        if failed.why == "machine":
            raise MemoryError(failed.detail)
        raise DecoderError(failed.detail, failed.code)


class DecodeProcesses:
    """Up to `bounds.num_processes` children, lent to any thread of one process."""

    def __init__(self, bounds: DecodingBounds) -> None:
        self.bounds = bounds
        self._idle: list[_Process] = []
        self._num_free = bounds.num_processes
        self._changed = threading.Condition()

    @contextmanager
    def lend(self, media: bytes, what: str) -> Iterator[Session]:
        """Lend a process for one item. Blocks while all are lent, each of them within its own limits.

        Args:
            media: the item's bytes.
            what: the item's kind, as callers read it.

        Raises:
            MemoryError, OSError: the machine has no process for it.
        """
        process = self._take()
        session: Session | None = None
        try:
            with _memory("media") as source, _memory("decoded") as output:
                with open(source, "wb", closefd=False) as writer:
                    writer.write(media)
                session = Session(process, output, what, self.bounds)
                session.ask(messages.Begin(self.bounds.cpu_s), messages.Acknowledged, (source, output))
                yield session
        finally:
            if session is not None and (session.is_waiting or not self._is_clean(process)):
                process.end()
            self._give_back(process)

    def close(self) -> None:
        with self._changed:
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def _take(self) -> _Process:
        with self._changed:
            self._changed.wait_for(lambda: self._num_free > 0)
            self._num_free -= 1
            process = self._idle.pop() if self._idle else None
        try:
            if process is not None and process.try_receive(0.0) is None:
                return process
            if process is not None:  # it was ended while it was idle
                process.end()
            return self._start()
        except BaseException:
            self._give_back(None)
            raise

    def _give_back(self, process: _Process | None) -> None:
        with self._changed:
            if process is not None and process.end.alive:
                self._idle.append(process)
            self._num_free += 1
            self._changed.notify()

    def _start(self) -> _Process:
        process = _Process(self.bounds.num_bytes)
        if not process.try_receive(START_TIMEOUT_S):
            process.end()
            raise MemoryError("a decoding process could not be started")
        return process

    def _is_clean(self, process: _Process) -> bool:
        process.send(messages.End())
        packet = process.try_receive(END_TIMEOUT_S)
        if not packet:
            return False
        try:
            reply = messages.REPLIES.decode(packet)
        except msgspec.DecodeError:
            return False
        limit = self.bounds.num_bytes // KEPT_SHARE
        return isinstance(reply, messages.Ended) and reply.num_bytes <= limit


@contextmanager
def _memory(name: str) -> Iterator[int]:
    """A file in memory, that has no name outside, and is never made smaller: the host maps it."""
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        yield file
    finally:
        os.close(file)
