"""Client of the compile server: which grammars may go to EngineCore, and the compiled form of slow ones.

A tenant compiles one grammar at a time, so that many of one tenant's do not keep another tenant's waiting.
What is known to compile is kept by tenant: the time of an answer does not show which grammars others use.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import socket
import sys
from asyncio.subprocess import Process
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from triptych_common.domain.errors import TriptychError
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.grammars.compile_server import READY, CompileLimits
from triptych_vllm_connector.grammars.grammar_job import GrammarJob

log = get_logger(__name__)

SERVER = "triptych_vllm_connector.grammars.compile_server"
NUM_PROCESSES = 2
MAX_TEXT_CHARS = 1 << 20
"""The gateway's bound is lower; this one guards against other senders."""
MAX_KNOWN = 1024
MAX_HEAVY_BYTES = 256 << 20
LIGHT_CPU_S = 0.25
RECOMPILE_CPU_S = 2.0
"""Longest compilation that EngineCore repeats: the serialized form of many properties is larger by far."""
MAX_COMPILED_BYTES = 64 << 20
_START_TIMEOUT_S = 120.0
_GRACE_S = 1.0
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class GrammarRefusedError(Exception):
    """The caller's grammar is not valid, or takes more than a compile process may use."""


class CompileServerError(TriptychError):
    """The compile server cannot be started."""


class SlowGrammar:
    """A grammar that EngineCore handles in its slow lane; in a memfd, if it is too slow to compile there."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        """`fd` is owned by this object. `num_bytes`: 0 where nothing was written."""
        self._fd = fd
        self.num_bytes = num_bytes
        # The descriptor's number is used again when this object is gone: EngineCore compares the inode.
        self.place: list[Any] = [f"/proc/{os.getpid()}/fd/{fd}", os.fstat(fd).st_ino] if num_bytes else []

    def __del__(self) -> None:
        os.close(self._fd)


@dataclass
class _KnownGrammars:
    """Least recently used first. Keys hold a digest in place of the text."""

    entries: OrderedDict[tuple[object, ...], SlowGrammar | None] = field(default_factory=OrderedDict)
    num_bytes: int = 0

    def add(self, key: tuple[object, ...], grammar: SlowGrammar | None) -> None:
        self.entries[key] = grammar
        self.num_bytes += _num_bytes(grammar)
        while len(self.entries) > MAX_KNOWN or self.num_bytes > MAX_HEAVY_BYTES:
            self.num_bytes -= _num_bytes(self.entries.popitem(last=False)[1])


def _num_bytes(grammar: SlowGrammar | None) -> int:
    return 0 if grammar is None else grammar.num_bytes


@dataclass
class _Server:
    """One start of the compile server."""

    process: Process
    control: socket.socket
    is_ready: bool = False

    def has_ended(self) -> bool:
        """Return whether the process is gone; asyncio learns it later. Behind READY it sends nothing."""
        if not self.is_ready:
            return False
        try:
            return self.control.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


class GrammarCompiler:
    """Compiles callers' grammars outside of this process. Made by `open`."""

    def __init__(self, tokenizer_fd: int, limits: CompileLimits) -> None:
        self._tokenizer_fd, self._limits = tokenizer_fd, limits
        self._known = _KnownGrammars()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._slots = asyncio.Semaphore(NUM_PROCESSES)
        self._starting = asyncio.Lock()
        self._server: _Server | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls, *tokenizers: str, timeout_s: float, memory_bytes: int
    ) -> "AsyncIterator[GrammarCompiler]":
        """Start the compile server, and end it.

        Args:
            tokenizers: xgrammar's `TokenizerInfo`s, serialized, as `tokenizer_of` chooses among them.
        """
        limits = CompileLimits(timeout_s, memory_bytes, RECOMPILE_CPU_S, MAX_COMPILED_BYTES)
        tokenizer_fd = os.memfd_create("tokenizer")
        with contextlib.closing(os.fdopen(tokenizer_fd, "wb")) as file:
            file.write(json.dumps(tokenizers).encode())
            file.flush()
            compiler = cls(tokenizer_fd, limits)
            try:
                # It imports for some seconds: the first grammar waits for it, and nothing else does.
                compiler._server = await compiler._start_server()
                yield compiler
            finally:
                await compiler._end_server()

    @property
    def server_pid(self) -> int | None:
        """Process id of the compile server that runs."""
        return None if self._server is None else self._server.process.pid

    async def compile(self, job: GrammarJob, tenant: str) -> SlowGrammar | None:
        """Return when `job` is known to compile; None: it is light.

        Raises:
            GrammarRefusedError: the message is for the caller.
            CompileServerError: nothing can be compiled.
        """
        if len(job.text) > MAX_TEXT_CHARS:
            raise GrammarRefusedError(f"is longer than {MAX_TEXT_CHARS} characters")
        digest = hashlib.blake2b(job.text.encode(errors="surrogatepass"), digest_size=32).digest()
        key = (tenant, job.kind, job.is_compact, digest)
        if key not in self._known.entries:
            async with self._turns.setdefault(tenant, asyncio.Lock()):
                if key not in self._known.entries:
                    async with self._slots:
                        self._known.add(key, await self._compile(job))
        self._known.entries.move_to_end(key)
        return self._known.entries[key]

    async def _compile(self, job: GrammarJob) -> SlowGrammar | None:
        output_fd = os.memfd_create("grammar")
        try:
            reply = await self._ask(job, output_fd)
            if "error" in reply:
                raise GrammarRefusedError(f"is not valid: {reply['error']}")
            if "is_slow_in_engine" in reply:
                raise GrammarRefusedError("is too complex: it takes too much CPU time with each token")
            if "num_bytes" not in reply:
                log.warning("grammar refused: compile process ended", kind=job.kind, num_chars=len(job.text))
                raise GrammarRefusedError(
                    f"is too complex: it was not compiled within {self._limits.timeout_s:g} s of CPU time "
                    f"and {self._limits.memory_bytes >> 20} MiB"
                )
            if reply["cpu_s"] <= LIGHT_CPU_S:
                return None
            grammar = SlowGrammar(output_fd, reply["num_bytes"])
            output_fd = -1
            return grammar
        finally:
            if output_fd >= 0:
                os.close(output_fd)

    async def _ask(self, job: GrammarJob, output_fd: int) -> dict[str, Any]:
        """Return the reply of a compile process; {} if the process was ended."""
        for _ in range(2):
            server = await self._running_server()
            reply = await self._ask_server(server, job, output_fd)
            if reply or not server.has_ended():
                return json.loads(reply) if reply else {}
            # The server itself has ended, which is not the grammar's fault.
        raise CompileServerError("the compile server of structured outputs does not stay alive")

    async def _ask_server(self, server: _Server, job: GrammarJob, output_fd: int) -> bytes:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(server.control, [b"j"], [theirs.fileno(), output_fd])
        except OSError:
            ours.close()
            return b""
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            async with asyncio.timeout(self._limits.wall_s + _GRACE_S):
                writer.write(json.dumps(job._asdict()).encode())
                writer.write_eof()
                return await reader.read()
        except (OSError, TimeoutError):
            return b""
        finally:
            writer.transport.abort()  # the kernel ends the compile process then

    # ---- the server --------------------------------------------------------------------------------
    async def _running_server(self) -> _Server:
        """The server, which accepts jobs; started again if it has ended."""
        async with self._starting:
            if self._server is None or self._server.has_ended():
                await self._end_server()
                self._server = await self._start_server()
            server = self._server
            if not server.is_ready:
                try:
                    await _wait_ready(server.control)
                except CompileServerError:
                    await self._end_server()
                    raise
                server.is_ready = True
        return server

    async def _start_server(self) -> _Server:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        os.lseek(self._tokenizer_fd, 0, os.SEEK_SET)
        with theirs:
            fds = (theirs.fileno(), self._tokenizer_fd)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", SERVER, *map(str, fds), json.dumps(self._limits),
                pass_fds=fds,
                env={**os.environ, **_THREADS, "CUDA_VISIBLE_DEVICES": ""},  # noqa: TID251 -- handed on
                stdin=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        return _Server(process, ours)

    async def _end_server(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        server.control.close()
        with contextlib.suppress(ProcessLookupError):
            server.process.kill()
        await server.process.wait()


async def _wait_ready(control: socket.socket) -> None:
    """Wait until the server is ready; raises CompileServerError."""
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            if await asyncio.get_running_loop().sock_recv(control, len(READY)) == READY:
                return
    except (OSError, TimeoutError):
        pass
    raise CompileServerError("the compile server of structured outputs did not start")
