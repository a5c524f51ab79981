"""`RuntimeDriver` against NVIDIA's bindings as they are: every call exists and takes what it is given.

Without a GPU each call is refused by CUDA itself, and by nothing before it. With one, tests/gpu proves more.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

runtime = pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed")

from cuda.bindings import driver as cuda_driver  # noqa: E402

from triptych_common.region.cuda.driver import CudaError  # noqa: E402
from triptych_common.region.cuda.loading import has_bindings  # noqa: E402
from triptych_common.region.cuda.runtime import RuntimeDriver  # noqa: E402

UUID_OF_A_PART = "cuDeviceGetUuid_v2" if hasattr(cuda_driver, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
"""Of a part of a GPU (MIG). The first version of the call, in CUDA 12's bindings, is of the whole one."""

CALLS: list[tuple[str, Callable[[Any], object]]] = [
    ("cudaSetDevice", lambda driver: driver.bind_thread()),
    ("cuDeviceGet", lambda driver: driver.device_uuid()),
    ("cudaDeviceGetPCIBusId", lambda driver: driver.pci_bus_id()),
    ("cudaDeviceGetAttribute", lambda driver: driver.is_mps_client()),
    ("cudaDeviceGetAttribute", lambda driver: driver.num_multiprocessors()),
    ("cudaMalloc", lambda driver: driver.malloc(4096)),
    ("cudaFree", lambda driver: driver.free(4096)),
    ("cudaIpcGetMemHandle", lambda driver: driver.ipc_get_handle(4096)),
    ("cudaIpcOpenMemHandle", lambda driver: driver.ipc_open(bytes(64))),
    ("cudaIpcCloseMemHandle", lambda driver: driver.ipc_close(4096)),
    ("cudaHostRegister", lambda driver: driver.host_register(4096, 4096)),
    ("cudaHostUnregister", lambda driver: driver.host_unregister(4096)),
    ("cudaMemcpyAsync", lambda driver: driver.memcpy_async(4096, 8192, 64, 0)),
    ("cudaStreamCreateWithFlags", lambda driver: driver.stream_create()),
    ("cudaStreamDestroy", lambda driver: driver.stream_destroy(4096)),
    ("cudaStreamSynchronize", lambda driver: driver.stream_synchronize(0)),
    ("cudaStreamWaitEvent", lambda driver: driver.stream_wait_event(4096, 4096)),
    ("cudaEventCreateWithFlags", lambda driver: driver.event_create()),
    ("cudaEventRecord", lambda driver: driver.event_record(4096, 4096)),
    ("cudaEventQuery", lambda driver: driver.event_query(4096)),
    ("cudaEventSynchronize", lambda driver: driver.event_synchronize(4096)),
    ("cudaEventDestroy", lambda driver: driver.event_destroy(4096)),
]


@pytest.fixture
def driver() -> RuntimeDriver:
    """One for a GPU that is not there."""
    try:
        code, count = runtime.cudaGetDeviceCount()
    except RuntimeError as error:
        pytest.skip(f"older bindings do nothing without CUDA's own library: {error}")
    if code == runtime.cudaError_t.cudaSuccess and count:
        pytest.skip("there is a GPU: these calls would reach it")
    driver = RuntimeDriver.__new__(RuntimeDriver)
    driver._device = 0
    return driver


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[name for name, _ in CALLS])
def test_every_call_is_refused_by_cuda_alone(
    driver: RuntimeDriver, name: str, call: Callable[[Any], object]
) -> None:
    with pytest.raises(CudaError, match=f"^{name}: "):
        call(driver)


def test_a_gpu_that_is_not_there_is_reported() -> None:
    assert has_bindings()
    with pytest.raises(CudaError, match=r"cudaGetDeviceCount|there is no GPU number 99"):
        RuntimeDriver(99)


def test_an_event_that_is_not_reached_is_no_error(
    driver: RuntimeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "cudaEventQuery", lambda event: (runtime.cudaError_t.cudaErrorNotReady,))
    assert not driver.event_query(4096)
    monkeypatch.setattr(runtime, "cudaEventQuery", lambda event: (runtime.cudaError_t.cudaSuccess,))
    assert driver.event_query(4096)


def test_addresses_and_handles_are_numbers_whatever_the_bindings_make_of_them(
    driver: RuntimeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    success = runtime.cudaError_t.cudaSuccess
    made = {
        "cudaStreamCreateWithFlags": (driver.stream_create, runtime.cudaStream_t(4096)),
        "cudaEventCreateWithFlags": (driver.event_create, runtime.cudaEvent_t(4096)),
        "cudaMalloc": (lambda: driver.malloc(64), cuda_driver.CUdeviceptr(4096)),
    }
    for name, (call, value) in made.items():
        monkeypatch.setattr(runtime, name, lambda *_, value=value: (success, value))
        assert type(call()) is int
        assert call() == 4096, name
    monkeypatch.setattr(runtime, "cudaDeviceGetPCIBusId", lambda *_: (success, b"0000:3B:00.0\0\0"))
    assert driver.pci_bus_id() == "0000:3B:00.0"


def test_handles_and_uuids_are_read_from_where_the_bindings_keep_them(
    driver: RuntimeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    success, expected = runtime.cudaError_t.cudaSuccess, bytes(range(64))
    handle, found = runtime.cudaIpcMemHandle_t(), cuda_driver.CUuuid()
    ctypes.memmove(handle.getPtr(), expected, 64)
    ctypes.memmove(found.getPtr(), expected, 16)
    opened: list[bytes] = []

    def open_handle(handle: Any, flags: int) -> tuple[Any, int]:
        opened.append(ctypes.string_at(handle.getPtr(), 64))
        return success, 4096

    monkeypatch.setattr(runtime, "cudaIpcGetMemHandle", lambda address: (success, handle))
    done = cuda_driver.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(cuda_driver, "cuDeviceGet", lambda ordinal: (done, cuda_driver.CUdevice(ordinal)))
    monkeypatch.setattr(cuda_driver, UUID_OF_A_PART, lambda device: (done, found))
    monkeypatch.setattr(runtime, "cudaIpcOpenMemHandle", open_handle)
    assert driver.ipc_get_handle(4096) == expected
    assert driver.device_uuid() == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert driver.ipc_open(expected) == 4096
    assert opened == [expected]
    with pytest.raises(CudaError, match="64 bytes"):
        driver.ipc_open(b"short")
