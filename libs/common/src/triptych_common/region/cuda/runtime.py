"""`CudaDriver` over NVIDIA's own bindings of the CUDA runtime. Imported by `driver.load_driver` only."""

import ctypes
import uuid
from typing import Any

from cuda.bindings import runtime

from triptych_common.region.cuda.driver import IPC_HANDLE_NUM_BYTES, CudaError


class RuntimeDriver:
    """The calls as they are, with their errors raised."""

    def __init__(self, device: int) -> None:
        self._device = device
        try:
            count = _call("cudaGetDeviceCount", runtime.cudaGetDeviceCount())
        except RuntimeError as error:  # older bindings, where CUDA's own library is missing
            raise CudaError(f"cudaGetDeviceCount: {error}") from error
        if device >= count:
            raise CudaError(f"there is no GPU number {device}: {count} can be seen")
        self.bind_thread()

    def bind_thread(self) -> None:
        _call("cudaSetDevice", runtime.cudaSetDevice(self._device))

    def device_uuid(self) -> str:
        properties = _call("cudaGetDeviceProperties", runtime.cudaGetDeviceProperties(self._device))
        raw = ctypes.string_at(properties.uuid.getPtr(), 16)
        return f"GPU-{uuid.UUID(bytes=raw)}"

    # ---- memory ----
    def malloc(self, num_bytes: int) -> int:
        return int(_call("cudaMalloc", runtime.cudaMalloc(num_bytes)))

    def free(self, address: int) -> None:
        _call("cudaFree", runtime.cudaFree(address))

    def ipc_get_handle(self, address: int) -> bytes:
        handle = _call("cudaIpcGetMemHandle", runtime.cudaIpcGetMemHandle(address))
        return ctypes.string_at(handle.getPtr(), IPC_HANDLE_NUM_BYTES)

    def ipc_open(self, handle: bytes) -> int:
        if len(handle) != IPC_HANDLE_NUM_BYTES:
            raise CudaError(f"an IPC handle has {IPC_HANDLE_NUM_BYTES} bytes, not {len(handle)}")
        opened = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(opened.getPtr(), handle, IPC_HANDLE_NUM_BYTES)
        flags = runtime.cudaIpcMemLazyEnablePeerAccess
        return int(_call("cudaIpcOpenMemHandle", runtime.cudaIpcOpenMemHandle(opened, flags)))

    def ipc_close(self, address: int) -> None:
        _call("cudaIpcCloseMemHandle", runtime.cudaIpcCloseMemHandle(address))

    def host_register(self, address: int, num_bytes: int) -> None:
        flags = runtime.cudaHostRegisterPortable
        _call("cudaHostRegister", runtime.cudaHostRegister(address, num_bytes, flags))

    def host_unregister(self, address: int) -> None:
        _call("cudaHostUnregister", runtime.cudaHostUnregister(address))

    def memcpy_async(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
        _call("cudaMemcpyAsync", runtime.cudaMemcpyAsync(target, source, num_bytes, kind, stream))

    # ---- order ----
    def stream_create(self) -> int:
        flags = runtime.cudaStreamNonBlocking
        return int(_call("cudaStreamCreateWithFlags", runtime.cudaStreamCreateWithFlags(flags)))

    def stream_destroy(self, stream: int) -> None:
        _call("cudaStreamDestroy", runtime.cudaStreamDestroy(stream))

    def stream_wait_event(self, stream: int, event: int) -> None:
        _call("cudaStreamWaitEvent", runtime.cudaStreamWaitEvent(stream, event, 0))

    def event_create(self) -> int:
        flags = runtime.cudaEventDisableTiming | runtime.cudaEventBlockingSync
        return int(_call("cudaEventCreateWithFlags", runtime.cudaEventCreateWithFlags(flags)))

    def event_record(self, event: int, stream: int) -> None:
        _call("cudaEventRecord", runtime.cudaEventRecord(event, stream))

    def event_query(self, event: int) -> bool:
        (code,) = runtime.cudaEventQuery(event)
        if code == runtime.cudaError_t.cudaErrorNotReady:
            return False
        _call("cudaEventQuery", (code,))
        return True

    def event_synchronize(self, event: int) -> None:
        _call("cudaEventSynchronize", runtime.cudaEventSynchronize(event))

    def event_destroy(self, event: int) -> None:
        _call("cudaEventDestroy", runtime.cudaEventDestroy(event))


def _call(name: str, result: tuple[Any, ...]) -> Any:
    """The value of a call: the bindings return (error, value) or (error,)."""
    code, *values = result
    if code != runtime.cudaError_t.cudaSuccess:
        _, text = runtime.cudaGetErrorString(code)
        raise CudaError(f"{name}: {text.decode() if isinstance(text, bytes) else text}")
    return values[0] if values else None
