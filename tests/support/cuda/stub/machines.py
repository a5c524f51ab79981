"""Machines of a system around the stub: a real GPU and processes, or a fake GPU in this process."""

import asyncio
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from tests.support.cuda.fake_cuda import FakeDevice, FakeDriver, FakeGpu
from tests.support.cuda.stub.devices import HostStubDevice
from tests.support.cuda.stub.handles import LocalRole, RoleHandle, RoleProcess
from tests.support.cuda.stub.roles import ENCODER, MIB, EncoderRole, PrefillDecodeRole
from tests.support.cuda.stub.system import StubSystem, wait_for
from tests.support.stores import StoreProcess
from triptych_cache_store import service
from triptych_cache_store.settings import StoreSettings
from triptych_common.domain.errors import StoreUnavailableError
from triptych_common.runtime import StopSignal
from triptych_common.store_session import StoreSession
from triptych_vllm_connector.worker import transports, writing
from triptych_vllm_connector.worker.writing import HostClock

NOTHING: Mapping[str, str] = MappingProxyType({})


class Machine(ABC):
    """Makes systems, and ends them with itself."""

    large_rows: int  # of the largest item that most tests pass on
    num_repeats: int  # of what is timed

    def __init__(self, run_dir: Path) -> None:
        """Stores keep their files below `run_dir`."""
        self._run_dir = run_dir
        self._systems: list[StubSystem] = []

    def start(
        self,
        *,
        slab_bytes: int = 64 * MIB,
        region_bytes: int = 64 * MIB,
        env: Mapping[str, str] = NOTHING,
        store_env: Mapping[str, str] = NOTHING,
    ) -> StubSystem:
        """Start a store and both roles, with `store_env` and `env` added to their environments."""
        folder = self._run_dir / f"store-{len(self._systems)}"
        folder.mkdir(mode=0o700)
        store = self._make_store(folder, slab_bytes, region_bytes)
        with _environment(store_env):
            store.start()
        system = StubSystem(store, lambda role, instance: self._make_role(role, instance, store.socket, env))
        self._systems.append(system)
        return system

    def close(self) -> None:
        for system in self._systems:
            system.close()

    @abstractmethod
    def _make_store(self, folder: Path, slab_bytes: int, region_bytes: int) -> StoreProcess: ...

    @abstractmethod
    def _make_role(self, role: str, instance: str, socket: Path, env: Mapping[str, str]) -> RoleHandle: ...


class ProcessMachine(Machine):
    """Store and roles in processes of their own, on the machine's first GPU or on its CPU."""

    large_rows = 4096
    num_repeats = 20

    def __init__(self, run_dir: Path, device: str = "cuda") -> None:
        """`device` is "cuda" or "cpu"."""
        super().__init__(run_dir)
        self._device = device

    def _make_store(self, folder: Path, slab_bytes: int, region_bytes: int) -> StoreProcess:
        options = (f"--slab-bytes={slab_bytes}", "--reserve-fraction=0")
        return StoreProcess(folder, *options, region_bytes=region_bytes)

    def _make_role(self, role: str, instance: str, socket: Path, env: Mapping[str, str]) -> RoleHandle:
        return RoleProcess(role, instance, socket, self._device, env)


class FakeMachine(Machine):
    """A GPU in host memory; store and roles are parts of this process."""

    large_rows = 128
    num_repeats = 2

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Give the workers and the stores that start from now on a fake GPU."""
        super().__init__(run_dir)
        self.gpu = FakeGpu(runs_by_itself=True)
        self._drivers: list[FakeDriver] = []  # of the workers
        self._slab_owner: FakeDriver | None = None
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(transports, "load_driver", self._load_driver)
        monkeypatch.setattr(transports, "TorchDevice", lambda index: FakeDevice(self._drivers[-1]))
        monkeypatch.setattr(writing, "clock_of", lambda device_type: HostClock())
        monkeypatch.setattr(service, "load_driver", self._load_slab_driver)

    def _make_store(self, folder: Path, slab_bytes: int, region_bytes: int) -> StoreProcess:
        settings = StoreSettings(
            run_dir=folder,
            region_bytes=region_bytes,
            slab_bytes=slab_bytes,
            reserve_fraction=0,
            keep_region=True,
        )
        return StoreInThread(settings, self._end_slab_owner)

    def _make_role(self, role: str, instance: str, socket: Path, env: Mapping[str, str]) -> RoleHandle:
        device = HostStubDevice()
        if role != ENCODER:
            return LocalRole(PrefillDecodeRole(instance, str(socket), device))
        encoder = EncoderRole(
            instance, str(socket), device, own=lambda tensor: FakeDevice(driver).own(tensor)
        )
        driver = self._drivers[-1]  # the worker has loaded it
        return LocalRole(encoder)

    def _load_driver(self, index: int) -> FakeDriver:
        self._drivers.append(FakeDriver(self.gpu))
        return self._drivers[-1]

    def _load_slab_driver(self, index: int) -> FakeDriver:
        self._slab_owner = FakeDriver(self.gpu)
        return self._slab_owner

    def _end_slab_owner(self) -> None:
        if self._slab_owner is not None:
            self._slab_owner.die()
            self._slab_owner = None


class StoreInThread(StoreProcess):
    """The daemon in a thread of this process, whose fake GPU it shares. It ends in good order alone."""

    def __init__(self, settings: StoreSettings, on_end: Callable[[], None]) -> None:
        """`on_end` is called where the daemon's process would be gone."""
        super().__init__(settings.run_dir)
        self._settings = settings
        self._on_end = on_end
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_signal: StopSignal | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="store")
        self._thread.start()
        wait_for(self._answers, "the store answers")

    def stop(self, with_signal: signal.Signals = signal.SIGTERM) -> int:
        if self._thread is not None and self._loop is not None and self._stop_signal is not None:
            self._loop.call_soon_threadsafe(self._stop_signal.set, with_signal.name)
            self._thread.join()
            self._thread = None
            self._on_end()
        return 0

    def log(self) -> str:
        return "in this process's own log"

    def close(self) -> None:
        super().close()
        self.stop()

    async def _serve(self) -> None:
        self._loop, self._stop_signal = asyncio.get_running_loop(), StopSignal()
        await service.run_store(self._settings, self._stop_signal)

    def _answers(self) -> bool:
        if self._thread is None or not self._thread.is_alive():
            raise RuntimeError("the store has ended")
        try:
            StoreSession.connect(self.socket, "probe").close()
        except StoreUnavailableError:
            return False
        return True


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Give processes that are started inside `variables` too."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield
