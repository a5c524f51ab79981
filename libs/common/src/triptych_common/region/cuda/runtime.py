"""`CudaDriver` over NVIDIA's own bindings of the CUDA runtime. Imported by `loading.load_driver` only.

The UUID alone is asked of the driver: the runtime's device properties name the whole GPU where the process
has a part of it (MIG), and parts share no memory.
"""

import ctypes
import uuid
from typing import Any

from cuda.bindings import driver, runtime

from triptych_common.region.cuda.driver import IPC_HANDLE_NUM_BYTES, CudaError

PCI_BUS_ID_BYTES = 32


class RuntimeDriver:
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
        # Bindings of CUDA 12 have two; the later one, alone in those of CUDA 13, is of the part.
        get_uuid = getattr(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid)
        try:
            device = _call_driver("cuDeviceGet", driver.cuDeviceGet(self._device))
            found = _call_driver("cuDeviceGetUuid", get_uuid(device))
        except RuntimeError as error:  # the driver's library is missing
            raise CudaError(f"cuDeviceGet: {error}") from error
        return f"GPU-{uuid.UUID(bytes=ctypes.string_at(found.getPtr(), 16))}"

    def pci_bus_id(self) -> str:
        result = runtime.cudaDeviceGetPCIBusId(PCI_BUS_ID_BYTES, self._device)
        name: bytes = _call("cudaDeviceGetPCIBusId", result)
        return name.split(b"\0")[0].decode()

    def is_mps_client(self) -> bool:
        return bool(self._attribute(runtime.cudaDeviceAttr.cudaDevAttrMpsEnabled))

    def num_multiprocessors(self) -> int:
        return self._attribute(runtime.cudaDeviceAttr.cudaDevAttrMultiProcessorCount)

    def _attribute(self, attribute: Any) -> int:
        result = runtime.cudaDeviceGetAttribute(attribute, self._device)
        return int(_call("cudaDeviceGetAttribute", result))

    # ---- memory ----
    def malloc(self, num_bytes: int) -> int:
        return _address(_call("cudaMalloc", runtime.cudaMalloc(num_bytes)))

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
        return _address(_call("cudaIpcOpenMemHandle", runtime.cudaIpcOpenMemHandle(opened, flags)))

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
        return _address(_call("cudaStreamCreateWithFlags", runtime.cudaStreamCreateWithFlags(flags)))

    def stream_destroy(self, stream: int) -> None:
        _call("cudaStreamDestroy", runtime.cudaStreamDestroy(stream))

    def stream_synchronize(self, stream: int) -> None:
        _call("cudaStreamSynchronize", runtime.cudaStreamSynchronize(stream))

    def stream_wait_event(self, stream: int, event: int) -> None:
        _call("cudaStreamWaitEvent", runtime.cudaStreamWaitEvent(stream, event, 0))

    def event_create(self) -> int:
        flags = runtime.cudaEventDisableTiming | runtime.cudaEventBlockingSync
        return _address(_call("cudaEventCreateWithFlags", runtime.cudaEventCreateWithFlags(flags)))

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


def _address(value: Any) -> int:
    """Return a pointer or handle as a number: bindings return either a number or an object that has one."""
    return int(value)


def _call(name: str, result: tuple[Any, ...]) -> Any:
    """Return the value of a call: the bindings return (error, value) or (error,)."""
    code, *values = result
    if code != runtime.cudaError_t.cudaSuccess:
        _, text = runtime.cudaGetErrorString(code)
        raise CudaError(f"{name}: {text.decode() if isinstance(text, bytes) else text}")
    return values[0] if values else None


def _call_driver(name: str, result: tuple[Any, ...]) -> Any:
    code, *values = result
    if code != driver.CUresult.CUDA_SUCCESS:
        raise CudaError(f"{name}: {code.name}")
    return values[0]
