"""Compile server: forks a process for each grammar, which compiles it within limits and ends.

    python -m triptych_vllm_connector.grammars.compile_server CONTROL_FD TOKENIZER_FD LIMITS

The host sends one datagram for each grammar over CONTROL_FD, with two descriptors: a socket, over which the
job comes and the reply goes, and a memfd for the compiled form of a heavy grammar. The server ends when the
host closes CONTROL_FD. A compile process is ended by the kernel: by its limits, by its alarm, or as soon as
the host closes the socket.
"""

import contextlib
import json
import os
import re
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from triptych_vllm_connector.grammars.allowance import exceeds_allowance, longest_runs
from triptych_vllm_connector.grammars.grammar_job import tokenizer_of
from triptych_vllm_connector.process_exit import end_with_peer

READY = b"ready"
STACK_BYTES = 1 << 20
"""Stack of a compile process: an eighth of a thread's in EngineCore, where a recursion must not end."""
_NICENESS = 10
_PLACE = re.compile(r"^\[[0-9:]+\] [^\s:]+:[0-9]+: ")  # time, and line of xgrammar's source


class CompileLimits(NamedTuple):
    """Bounds of one compile process."""

    timeout_s: float  # of CPU time; `wall_s` of wall-clock time
    memory_bytes: int  # beyond what the server has
    recompile_cpu_s: float  # a grammar that took more is written to the memfd
    compiled_bytes: int  # of the compiled grammar

    @property
    def wall_s(self) -> float:
        """Longest wall-clock time: a process of nice 10 waits for a core where others compute."""
        return 3 * self.timeout_s


def main(control_fd: int, tokenizer_fd: int, limits: CompileLimits) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the host's Ctrl-C; the host ends this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizers = _read_tokenizers(tokenizer_fd)
    with socket.socket(fileno=control_fd) as control:
        control.send(READY)
        while True:
            message, fds, _, _ = socket.recv_fds(control, 1, 2)
            if not message:
                return
            if os.fork() == 0:
                control.close()
                _compile_and_exit(socket.socket(fileno=fds[0]), fds[1], limits, tokenizers)
            for fd in fds:
                os.close(fd)


class _Vocabulary(NamedTuple):
    info: Any  # xgrammar's `TokenizerInfo`
    runs: list[int]  # its `longest_runs`


def _read_tokenizers(tokenizer_fd: int) -> list[_Vocabulary]:
    import transformers  # noqa: F401  -- xgrammar cannot be imported first
    import xgrammar

    with open(tokenizer_fd, "rb") as file:
        infos = [xgrammar.TokenizerInfo.deserialize_json(each) for each in json.load(file)]
    return [_Vocabulary(each, longest_runs(each.decoded_vocab)) for each in infos]


def _compile_and_exit(
    reply_to: socket.socket, output_fd: int, limits: CompileLimits, tokenizers: list[_Vocabulary]
) -> None:
    """Runs in the forked process and does not return."""
    try:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno()
        )  # xgrammar warns there of callers' texts
        with contextlib.closing(reply_to):
            job = json.loads(_receive_all(reply_to))
            end_with_peer(reply_to.fileno())  # the host closes it when the caller has gone
            _limit(limits)
            tokenizer = tokenizer_of(job["kind"], tokenizers)
            reply_to.sendall(json.dumps(_reply(job, output_fd, limits, tokenizer)).encode())
    finally:
        os._exit(0)  # no finalizer of the server's runs here


def _receive_all(source: socket.socket) -> bytes:
    pieces = []
    while piece := source.recv(1 << 16):
        pieces.append(piece)
    return b"".join(pieces)


def _limit(limits: CompileLimits) -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    cpu_s = int(limits.timeout_s) + 1
    for name, bound in (
        (resource.RLIMIT_AS, size + limits.memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, limits.compiled_bytes),
        (resource.RLIMIT_STACK, STACK_BYTES),
    ):
        resource.setrlimit(name, (bound, bound))
    signal.setitimer(signal.ITIMER_REAL, limits.wall_s)


def _reply(
    job: dict[str, Any], output_fd: int, limits: CompileLimits, vocabulary: _Vocabulary
) -> dict[str, Any]:
    started_s = time.process_time()
    try:
        compiled = compile_grammar(job, vocabulary.info)
        cpu_s = time.process_time() - started_s
        if exceeds_allowance(compiled, vocabulary.info.vocab_size, vocabulary.runs):
            return {"is_slow_in_engine": True}
    except MemoryError:
        return {}
    except Exception as error:  # xgrammar's errors have no common class
        fault = _PLACE.sub("", str(error)[:500]).strip()
        return {} if "bad_alloc" in fault else {"error": fault}
    if cpu_s <= limits.recompile_cpu_s:
        return {"cpu_s": cpu_s, "num_bytes": 0}
    content = memoryview(compiled.serialize_json().encode())
    num_bytes = len(content)
    while content:
        content = content[os.write(output_fd, content) :]
    return {"cpu_s": cpu_s, "num_bytes": num_bytes}


def compile_grammar(job: dict[str, Any], tokenizer_info: Any) -> Any:
    """The `CompiledGrammar` that vLLM's `XgrammarBackend.compile_grammar` makes of the same text.

    Raises:
        Exception: the text is not valid.
    """
    import xgrammar

    compiler = xgrammar.GrammarCompiler(tokenizer_info, max_threads=1, cache_enabled=False)
    text = job["text"]
    match job["kind"]:
        case "json":
            is_compact = job["is_compact"]
            return compiler.compile_json_schema(
                text, any_whitespace=not is_compact, separators=(",", ":") if is_compact else None
            )
        case "regex":
            return compiler.compile_regex(text)
        case "lark":
            return compiler.compile_lark(text)
        case "ebnf":
            return compiler.compile_grammar(text)
        case "structural_tag":
            tag = json.loads(text)
            if "structures" not in tag:
                return compiler.compile_structural_tag(text)
            items = [
                xgrammar.StructuralTagItem(
                    begin=each["begin"], schema=json.dumps(each["schema"]), end=each["end"]
                )
                for each in tag["structures"]
            ]
            return compiler.compile_structural_tag(items, tag["triggers"])
    raise ValueError(f"no such kind of grammar: {job['kind']}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), CompileLimits(*json.loads(sys.argv[3])))
