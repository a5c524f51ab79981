"""EngineCore and the compile server are forked from a forked process as it is now.

Encoders and prefill_decodes fork their EngineCore themselves. For vLLM's server and scripts it is done here.
"""

import asyncio
import json
import os
import socket
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from triptych_vllm_connector.grammars import compile_server, compiler
from triptych_vllm_connector.host import engine_fork

HOSTS = frozenset({"triptych_encoder", "triptych_prefill_decode"})


def fork_engines(module: str) -> None:
    """Fork what this process starts for an engine; it is about to run `module`."""
    if module not in HOSTS:
        engine_fork.fork_engine()
    patched: Any = compiler
    patched.asyncio = SimpleNamespace(**{**vars(asyncio), "create_subprocess_exec": _create_compile_server})


# ---- the compile server ----------------------------------------------------------------------------
async def _create_compile_server(*command: str, pass_fds: Sequence[int], **options: Any) -> "_CompileServer":
    control_fd, tokenizer_fd = pass_fds
    with socket.socket(fileno=os.dup(control_fd)) as control:
        tokenizer = f"/proc/{os.getpid()}/fd/{tokenizer_fd}"
        process = engine_fork._Context().Process(target=_compile, args=(control, tokenizer, command[-1]))
        process.start()
    return _CompileServer(process)


def _compile(control: socket.socket, tokenizer: str, limits: str) -> None:
    tokenizer_fd = os.open(tokenizer, os.O_RDONLY)
    compile_server.main(control.detach(), tokenizer_fd, compile_server.CompileLimits(*json.loads(limits)))


class _CompileServer:
    """As much of `asyncio.subprocess.Process` as a `GrammarCompiler` uses."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid
        self.kill = process.kill

    async def wait(self) -> int:
        await asyncio.to_thread(self._process.join)
        return int(self._process.exitcode)
