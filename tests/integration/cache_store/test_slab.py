"""The store's memory on a (fake) GPU over its life: found, mapped, tried, announced; never freed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cuda.fake_cuda import UUID, FakeDevice, FakeDriver, FakeGpu
from tests.support.vllm_connector.fake_store_worker import worker_config
from tests.support.waiting import until, until_async
from triptych_cache_store import service
from triptych_cache_store.settings import StoreSettings
from triptych_common.domain.errors import BusUnavailableError, StoreFullError, StoreUnavailableError
from triptych_common.protocol.messages import Transport
from triptych_common.protocol.store import SHM, Entries, Lookup, Reserve, Reserved, TensorSpec
from triptych_common.region import RegionMapping
from triptych_common.region.cuda.driver import CudaError
from triptych_common.runtime import StopSignal
from triptych_common.store_session import AsyncStoreSession
from triptych_vllm_connector.host import slab_watch
from triptych_vllm_connector.host.slab_watch import ProbeSlab, SlabWatch, TransportError
from triptych_vllm_connector.slab_probe import SlabProbeResult, UsableSlab, probe_in_engine
from triptych_vllm_connector.worker import transports
from triptych_vllm_connector.worker.cuda_transports import GpuTransports
from triptych_vllm_connector.worker.loading import LoadingWorker

LIMIT_S = 60.0
SLAB_BYTES = 2 << 20
EVERYTHING = (Transport.CUDA_IPC, Transport.PINNED_SHM, Transport.REDIS)


class Machine:
    """A GPU, and a real store in this process whose memory there is the fake one's."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu = FakeGpu(runs_by_itself=True)
        self.settings = StoreSettings(
            run_dir=run_dir, region_bytes=8 << 20, keep_region=True, slab_bytes=SLAB_BYTES
        )
        self._owner: FakeDriver | None = None
        self._stop: StopSignal | None = None
        self._task: asyncio.Task[None] | None = None
        monkeypatch.setattr(service, "load_driver", self._load_driver)

    def _load_driver(self, device: int) -> FakeDriver:
        self._owner = FakeDriver(self.gpu)
        return self._owner

    async def start(self) -> None:
        self._stop = StopSignal()
        self._task = asyncio.create_task(service.run_store(self.settings, self._stop))
        await until_async(lambda: service.is_healthy(self.settings, "probe"))

    async def stop(self) -> None:
        """In good order; then its process is gone, with what CUDA kept for it."""
        if self._stop is not None and self._task is not None:
            self._stop.set("test")
            await self._task
            self._stop = None
        if self._owner is not None:
            self._owner.die()
            self._owner = None


@pytest.fixture
async def machine(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Machine]:
    machine = Machine(run_dir, monkeypatch)
    await machine.start()
    yield machine
    await machine.stop()
    machine.gpu.assert_no_breach()


class Worker:
    """A worker's end on the GPU, and what its host is answered. `connect` is its way to the store."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.driver = FakeDriver(machine.gpu)
        self.known = UsableSlab()
        self.fails: str | None = None
        self.num_asked = 0
        self.is_behind = False  # its session has not come back to the store yet
        self.session: AsyncStoreSession
        self.ends = GpuTransports(
            self.driver, FakeDevice(self.driver), "cpu", self._no_region, lambda: self.session.welcome
        )

    def _no_region(self) -> RegionMapping:
        raise AssertionError("the region is not asked for here")

    async def ask(self) -> dict[str, Any]:
        """As EngineCore would be called."""
        self.num_asked += 1
        return probe_in_engine(self)

    def collective_rpc(self, name: str) -> list[dict[str, Any]]:
        generation = 1 if self.is_behind else self.session.welcome.generation
        self.driver.fail = self.fails
        try:
            self.ends.probe_slab()
        except Exception as error:
            return [{"device": UUID, "generation": generation, "failure": str(error)}]
        return [{"device": UUID, "generation": generation, "failure": None}]

    @property
    def scheduler(self) -> Any:
        class Scheduler:
            class ec_connector:  # noqa: N801
                slab = self.known

        return Scheduler


@asynccontextmanager
async def worker_of(machine: Machine) -> AsyncIterator[Worker]:
    worker = Worker(machine)
    path = machine.settings.store_socket
    async with await AsyncStoreSession.connect(path, "i-0/worker-0", reconnect_timeout_s=60.0) as session:
        worker.session = session
        yield worker
        worker.ends.close()


def watch_of(machine: Machine, ask: ProbeSlab | None, setting: Any = "auto") -> Any:
    return SlabWatch.open(machine.settings.store_socket, "i-0", setting, has_region=True, probe_slab=ask)


class Record:
    """A registration: what was published last."""

    def __init__(self) -> None:
        self.published: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.is_away = False

    async def update(self, **fields: Any) -> None:
        self.published.put_nowait(fields)
        if self.is_away:
            raise BusUnavailableError("away")

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(LIMIT_S):
            return await self.published.get()


@asynccontextmanager
async def running(watch: SlabWatch) -> AsyncIterator[Record]:
    record = Record()
    task = asyncio.create_task(watch.run(record))
    try:
        yield record
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_store_that_ends_frees_nothing_that_is_mapped(machine: Machine) -> None:
    async with worker_of(machine) as worker:
        worker.ends.probe_slab()
        await machine.stop()
        assert machine.gpu.num_bytes_held == SLAB_BYTES, "until its importer unmaps it"
    machine.gpu.assert_no_breach()
    assert machine.gpu.num_bytes_held == 0


@pytest.mark.parametrize("kind", ["slab", "region"])
async def test_blocks_of_a_dead_writer_come_back_after_a_while(
    machine: Machine, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, memory, num_bytes = machine.settings.store_socket, f"cuda:{UUID}", SLAB_BYTES
    if kind == "region":  # of a machine with a GPU, where no slab was wanted
        monkeypatch.setattr(service, "NVIDIA_CONTROL", tmp_path)
        memory, num_bytes = SHM, 6 << 20
        await machine.stop()
        machine.settings = machine.settings.model_copy(update={"slab_bytes": 0})
        await machine.start()
    spec = TensorSpec(shape=(num_bytes // 2, 1), dtype="float16", num_bytes=num_bytes)
    async with await AsyncStoreSession.connect(path, "encoder-1/worker-0") as other:
        async with await AsyncStoreSession.connect(path, "encoder-0/worker-0") as writer:
            first = Reserve(seq=0, mm_hash="a" * 64, spec=spec, memory=memory, may_use_reserve=True)
            await writer.request(first)
        again = first.model_copy(update={"mm_hash": "b" * 64})

        async def has_ended() -> bool:
            reply = await other.request(Lookup(seq=0, mm_hashes=("a" * 64,)))
            return isinstance(reply, Entries) and reply.entries[0].state == "absent"

        async def is_reserved() -> bool:
            try:
                return isinstance(await other.request(again), Reserved)
            except StoreFullError:
                return False

        await until_async(has_ended)
        with pytest.raises(StoreFullError):
            await other.request(again)
        await until_async(is_reserved)


async def test_cuda_ipc_is_announced_after_it_was_tried(machine: Machine) -> None:
    async with worker_of(machine) as worker, watch_of(machine, worker.ask) as watch:
        assert worker.driver.num_opens == 1
        generation = worker.session.welcome.generation
        assert watch.fields() == {
            "transports": EVERYTHING,
            "device": UUID,
            "slab_generation": generation,
            "slab_failure": None,
        }


async def test_a_slab_that_cannot_be_opened_is_logged_once_and_passed_over(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    async with worker_of(machine) as worker:
        worker.fails = "ipc_open"
        async with watch_of(machine, worker.ask) as watch:
            assert watch.own.transports == (Transport.PINNED_SHM, Transport.REDIS)
            assert watch.fields()["slab_generation"] is None
            assert "ipc_open" in watch.fields()["slab_failure"]
        with pytest.raises(TransportError, match="ipc_open"):
            async with watch_of(machine, worker.ask, "cuda_ipc"):
                pass
    warnings = [each for each in caplog.records if each.getMessage() == "cuda_ipc cannot be used"]
    assert len(warnings) == 2, "one line for each start"


async def test_it_is_tried_again_when_the_store_is_back(machine: Machine) -> None:
    async with worker_of(machine) as worker, watch_of(machine, worker.ask) as watch, running(watch) as record:
        before = watch.own.slab_generation
        worker.fails = "ipc_open"
        await machine.stop()
        await machine.start()
        fields = await record.next()
        assert fields["transports"] == (Transport.PINNED_SHM, Transport.REDIS)
        assert "ipc_open" in fields["slab_failure"]
        worker.fails = None
        await machine.stop()
        await machine.start()
        fields = await record.next()
        assert fields["transports"] == EVERYTHING
        assert fields["slab_generation"] > before
        assert machine.gpu.num_bytes_held == SLAB_BYTES, "of the store that lives, and no other"


async def test_a_slab_that_failed_is_tried_again_while_the_store_lives(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slab_watch, "FIRST_REPROBE_S", 0.01)
    monkeypatch.setattr(slab_watch, "LONGEST_REPROBE_S", 0.02)
    async with worker_of(machine) as worker:
        worker.fails = "ipc_open"
        async with watch_of(machine, worker.ask) as watch, running(watch) as record:
            num_asked = worker.num_asked
            await until(lambda: worker.num_asked >= num_asked + 4)
            assert record.published.empty(), "nothing has changed"
            warnings = [each for each in caplog.records if each.getMessage() == "cuda_ipc cannot be used"]
            assert len(warnings) == 1, "one line for each change"
            worker.fails = None
            fields = await record.next()
            assert (fields["transports"], fields["slab_failure"]) == (EVERYTHING, None)
            assert fields["slab_generation"] == worker.session.welcome.generation


async def test_a_call_that_goes_on_failing_is_logged_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slab_watch, "FIRST_REPROBE_S", 0.01)
    monkeypatch.setattr(slab_watch, "LONGEST_REPROBE_S", 0.02)
    num_asked = 0
    asked_often = asyncio.Event()

    async def ask() -> dict[str, Any]:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 4:
            asked_often.set()
        raise RuntimeError("Call to triptych_probe_slab method failed")

    async with watch_of(machine, ask) as watch, running(watch):
        async with asyncio.timeout(LIMIT_S):
            await asked_often.wait()
    assert len([each for each in caplog.records if each.exc_info]) == 1


async def test_a_worker_that_comes_back_later_is_waited_for(machine: Machine) -> None:
    async with worker_of(machine) as worker, watch_of(machine, worker.ask) as watch, running(watch) as record:
        worker.is_behind = True
        await machine.stop()
        await machine.start()
        num_asked = worker.num_asked
        await until(lambda: worker.num_asked >= num_asked + 2)
        assert record.published.empty()
        worker.is_behind = False
        assert (await record.next())["slab_failure"] is None


async def test_a_store_that_comes_back_without_device_memory_is_no_failure(machine: Machine) -> None:
    async with worker_of(machine) as worker, watch_of(machine, worker.ask) as watch, running(watch) as record:
        await machine.stop()
        machine.settings = machine.settings.model_copy(update={"slab_bytes": 0})
        await machine.start()
        fields = await record.next()
        assert fields["transports"] == (Transport.PINNED_SHM, Transport.REDIS)
        assert fields["slab_failure"] is None
        assert machine.gpu.num_bytes_held == 0


async def test_what_was_asked_for_by_name_is_left_only_by_a_restart(machine: Machine) -> None:
    async with (
        worker_of(machine) as worker,
        watch_of(machine, worker.ask, "cuda_ipc") as watch,
        running(watch) as record,
    ):
        assert watch.own.transports == (Transport.CUDA_IPC,)
        worker.fails = "ipc_open"
        record.is_away = True
        await machine.stop()
        await machine.start()
        fields = await record.next()
        assert fields["transports"] == (Transport.PINNED_SHM, Transport.REDIS)


async def test_a_call_that_fails_is_a_failure_of_the_slab_alone(machine: Machine) -> None:
    async def ask() -> dict[str, Any]:
        raise RuntimeError("Call to triptych_probe_slab method failed")

    async with watch_of(machine, ask) as watch:
        assert Transport.PINNED_SHM in watch.own.transports
        assert "method failed" in watch.fields()["slab_failure"]


async def test_a_session_that_is_over_ends_the_watch(machine: Machine) -> None:
    """The region is another, so every lease is lost: nothing is announced that no client can map."""
    async with worker_of(machine) as worker, watch_of(machine, worker.ask) as watch, running(watch) as record:
        await machine.stop()
        machine.settings.region_path.unlink()
        await machine.start()
        fields = await record.next()
        assert Transport.CUDA_IPC not in fields["transports"]
        assert "has ended" in fields["slab_failure"]


class TestMemoryForOneSlab:
    """A GPU with memory for one slab: the next store's has room when the workers have left the last one's."""

    @pytest.fixture
    async def gpu_worker(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> AsyncIterator[LoadingWorker]:
        """A worker as an engine has it, which does nothing while the store is away."""
        machine.gpu.capacity = SLAB_BYTES
        driver = FakeDriver(machine.gpu)
        monkeypatch.setattr(transports, "load_driver", lambda index: driver)
        monkeypatch.setattr(transports, "TorchDevice", lambda index: FakeDevice(driver))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        config = worker_config(tmp_path).model_copy(update={"store_socket": machine.settings.store_socket})
        worker = await asyncio.to_thread(LoadingWorker, config, 0, "fake")  # the store is in this thread
        yield worker
        await asyncio.to_thread(worker.close)

    async def test_workers_leave_the_slab_of_a_store_that_has_crashed(
        self, machine: Machine, gpu_worker: LoadingWorker
    ) -> None:
        assert gpu_worker.probe_slab().failure is None
        await machine.stop()
        await until(lambda: machine.gpu.num_bytes_held == 0)
        await machine.start()
        await until(lambda: gpu_worker.probe_slab().failure is None)

    async def test_the_store_waits_for_memory_that_a_view_holds(
        self, machine: Machine, gpu_worker: LoadingWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(service, "SLAB_RETRY_S", 0.01)
        assert gpu_worker.probe_slab().failure is None
        gpu_slab = gpu_worker._transports._gpu
        assert gpu_slab is not None
        held = gpu_slab.slab()
        held.acquire(0, 1)
        await machine.stop()
        starting = asyncio.create_task(machine.start())
        await until(lambda: machine.gpu.num_refused > 0)
        assert machine.gpu.num_bytes_held == SLAB_BYTES, "a view stays valid"
        held.release()
        await starting
        await until(lambda: gpu_worker.probe_slab().failure is None)

    async def test_a_store_that_gets_no_memory_runs_without(
        self, machine: Machine, gpu_worker: LoadingWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(service, "SLAB_TIMEOUT_S", 0.0)
        machine.gpu.capacity = 0
        await machine.stop()
        await machine.start()
        async with await AsyncStoreSession.connect(machine.settings.store_socket, "a") as session:
            assert session.welcome.slab is None

    async def test_a_store_that_is_only_out_of_reach_keeps_its_slab(
        self, machine: Machine, gpu_worker: LoadingWorker
    ) -> None:
        assert gpu_worker.probe_slab().failure is None
        gpu_slab = gpu_worker._transports._gpu
        assert gpu_slab is not None
        slab = gpu_slab.slab()
        gpu_worker._on_outage(StoreUnavailableError("set to fail"))
        with pytest.raises(CudaError, match="away"):
            slab.acquire(0, 1)
        gpu_worker._on_reconnect(gpu_worker._session.welcome)
        slab.acquire(0, 1)
        slab.release()
        assert gpu_slab.slab() is slab


async def test_a_slab_is_a_whole_number_of_cudas_own_units(machine: Machine) -> None:
    """The handle of less would open what others have beside it."""
    await machine.stop()
    machine.settings = machine.settings.model_copy(update={"slab_bytes": SLAB_BYTES + 4096})
    await machine.start()
    async with await AsyncStoreSession.connect(machine.settings.store_socket, "a") as session:
        assert session.welcome.slab is not None
        assert session.welcome.slab.num_bytes == 2 * SLAB_BYTES


async def test_the_region_lies_beside_the_slabs_gpu(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel is asked for the GPU's node, and refuses one that this machine does not have."""
    for node in ("node0", "node1000"):
        (tmp_path / "devices/system/node" / node).mkdir(parents=True)
    gpu = tmp_path / "bus/pci/devices" / FakeDriver(machine.gpu).pci_bus_id().lower()
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text("1000\n")
    monkeypatch.setattr(service, "SYSFS", tmp_path)
    await machine.stop()
    await machine.start()
    (asked,) = (each for each in caplog.records if each.getMessage() == "region not put beside the GPU")
    assert vars(asked)["triptych_fields"]["node"] == 1000


async def test_without_a_gpu_no_engine_maps_a_slab(machine: Machine) -> None:
    async with watch_of(machine, None) as watch, running(watch):
        assert watch.fields() == {
            "transports": (Transport.PINNED_SHM, Transport.REDIS),
            "device": None,
            "slab_generation": None,
            "slab_failure": None,
        }


class TestEngine:
    """EngineCore's method: its own connector has the result before the host."""

    def engine(self, *answers: dict[str, Any]) -> Any:
        class Engine:
            class scheduler:  # noqa: N801
                class ec_connector:  # noqa: N801
                    slab = UsableSlab()

            def collective_rpc(self, name: str) -> list[dict[str, Any]]:
                return list(answers)

        return Engine()

    def test_one_worker(self) -> None:
        answer = {"device": UUID, "generation": 3, "failure": None}
        engine = self.engine(answer)
        assert probe_in_engine(engine) == answer
        assert engine.scheduler.ec_connector.slab._result == SlabProbeResult(UUID, 3)

    def test_several_workers_have_no_slab_of_their_own(self) -> None:
        answer = {"device": UUID, "generation": 3, "failure": None}
        assert "several" in probe_in_engine(self.engine(answer, answer))["failure"]
