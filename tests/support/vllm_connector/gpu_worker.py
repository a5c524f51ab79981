"""A worker without a store on a fake GPU: its streams run when the test advances them."""

from pathlib import Path

import pytest

from tests.support.cuda.fake_cuda import FakeDevice, FakeDriver, FakeGpu
from tests.support.vllm_connector.fake_store_worker import FakeStoreSession
from triptych_common.protocol.store import SlabInfo, Welcome
from triptych_common.region import RegionMapping
from triptych_common.store_session import StoreSession
from triptych_vllm_connector.worker import store_worker
from triptych_vllm_connector.worker.cuda_transports import GpuTransports

NUM_BYTES, BLOCK_BYTES, WAIT_S = 1 << 16, 4096, 5.0


class GpuWorkerMachine:
    """A GPU, a region and what stands for `WorkerTransports` in a worker."""

    def __init__(self, folder: Path, session: FakeStoreSession) -> None:
        path = folder / "region"
        path.write_bytes(bytes(NUM_BYTES))
        self.gpu = FakeGpu()
        self.driver = FakeDriver(self.gpu)
        self.device = FakeDevice(self.driver, self.driver.stream_create())
        self.region = RegionMapping.open(path, NUM_BYTES, populate=False)
        self.welcome = Welcome(
            seq=1, store="s", generation=1, region_path=str(path), region_num_bytes=NUM_BYTES,
            block_num_bytes=BLOCK_BYTES, slab=self.new_slab(),
        )  # fmt: skip
        self.ends = GpuTransports(self.driver, self.device, "cpu", lambda: self.region, lambda: self.welcome)
        self.session = session

    def new_slab(self) -> SlabInfo | None:
        return None

    def close(self) -> None:
        self.ends.close()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make it what each worker that is made from now on has."""
        monkeypatch.setattr(StoreSession, "connect", lambda *args, **kwargs: self.session)
        monkeypatch.setattr(store_worker, "WorkerTransports", lambda *args: self)

    def end(self) -> None:
        """Run what is queued, and check that nothing has broken CUDA's rules."""
        self.gpu.advance_all()
        self.ends.close()
        self.gpu.assert_no_breach()
