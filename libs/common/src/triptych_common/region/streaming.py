"""Copies into the region that go around the caches.

A tensor of megabytes is next read by another process, on another core. An ordinary copy first reads every
line of its target into the cache, only to overwrite it; streaming stores write the lines straight to
memory, which takes half the time, and leaves the engine's data in the caches. libc streams only
what exceeds most of the last-level cache, on large servers some hundred MiB, so the loop is our own: a few
lines in LLVM's language, compiled for this machine by llvmlite, which comes with vLLM. Where that is
missing, libc copies.
"""

import ctypes
import importlib
import threading
from collections.abc import Callable
from typing import Any

from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

MIN_STREAMED_BYTES = 2 << 20
"""Bytes from which a copy is streamed; libc copies smaller ones sooner and leaves them in the cache."""
LINE_BYTES = 64

_CODE = """
define void @stream(ptr noalias %target, ptr noalias readonly %source, i64 %num_bytes) {
entry:
  br label %loop
loop:
  %at = phi i64 [ 0, %entry ], [ %next, %loop ]
  %from = getelementptr i8, ptr %source, i64 %at
  %to = getelementptr i8, ptr %target, i64 %at
  %line = load <64 x i8>, ptr %from, align 1
  store <64 x i8> %line, ptr %to, align 64, !nontemporal !0
  %next = add i64 %at, 64
  %more = icmp ult i64 %next, %num_bytes
  br i1 %more, label %loop, label %done
done:
  fence seq_cst
  ret void
}
!0 = !{ i32 1 }
"""
# The fence: streaming stores pass others, but must not pass the seal that follows them.

Copy = Callable[[int, int, int], object]
"""Copy from (target address, source address, bytes), without the GIL."""


class Copier:
    """Copies between addresses; the first large copy compiles the fast loop in the background."""

    def __init__(self) -> None:
        self._stream: Copy | None = None
        self._loading: threading.Thread | None = None
        self._lock = threading.Lock()

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        num_lines_bytes = 0
        if num_bytes >= MIN_STREAMED_BYTES and target % LINE_BYTES == 0:
            stream = self._stream
            if stream is None:
                self.start_loading()
            else:
                num_lines_bytes = num_bytes - num_bytes % LINE_BYTES
                stream(target, source, num_lines_bytes)
        if num_bytes > num_lines_bytes:
            ctypes.memmove(target + num_lines_bytes, source + num_lines_bytes, num_bytes - num_lines_bytes)

    def start_loading(self) -> None:
        """Start compiling the loop once; returns at once."""
        with self._lock:
            if self._loading is None:
                self._loading = threading.Thread(target=self._load, name="streaming-copy", daemon=True)
                self._loading.start()

    def wait_loaded(self, timeout_s: float) -> bool:
        self.start_loading()
        if self._loading is not None:
            self._loading.join(timeout_s)
        return self._stream is not None

    def _load(self) -> None:
        try:
            self._stream = _compiled()
        except (ImportError, RuntimeError, OSError) as error:
            log.info("large tensors are copied by libc", error=str(error))


def _compiled() -> Copy:
    """Return the loop as machine code of this CPU.

    Raises:
        ImportError: no llvmlite here.
        RuntimeError: LLVM cannot make code for this machine.
    """
    llvm = importlib.import_module("llvmlite.binding")  # optional, and slow to load
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    module = llvm.parse_assembly(_CODE)
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return _Loop(engine)


class _Loop:
    """The compiled loop; LLVM's engine owns its code."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._function = function(engine.get_function_address("stream"))

    def __call__(self, target: int, source: int, num_bytes: int) -> object:
        return self._function(target, source, num_bytes)
