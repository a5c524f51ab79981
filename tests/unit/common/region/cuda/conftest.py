"""A fake GPU with a store's slab, a region, and one process that uses them."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cuda.cuda_samples import SLAB_BYTES
from tests.support.cuda.fake_cuda import FakeDevice, FakeDriver, FakeGpu
from triptych_common.protocol.store import SlabInfo
from triptych_common.region import RegionMapping
from triptych_common.region.cuda.release import EventReleaser
from triptych_common.region.cuda.slab import DeviceSlab


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    gpu = FakeGpu()
    yield gpu
    gpu.assert_no_breach()


@pytest.fixture
def store(gpu: FakeGpu) -> FakeDriver:
    """Of the store's process."""
    return FakeDriver(gpu)


@pytest.fixture
def slab(store: FakeDriver) -> SlabInfo:
    return DeviceSlab(store, SLAB_BYTES).info


@pytest.fixture
def region(tmp_path: Path) -> RegionMapping:
    path = tmp_path / "region"
    path.write_bytes(bytes(SLAB_BYTES))
    return RegionMapping.open(path, SLAB_BYTES, populate=False)


@pytest.fixture
def driver(gpu: FakeGpu) -> FakeDriver:
    return FakeDriver(gpu)


@pytest.fixture
def device(driver: FakeDriver) -> FakeDevice:
    return FakeDevice(driver)


@pytest.fixture
def releaser(gpu: FakeGpu, driver: FakeDriver) -> Iterator[EventReleaser]:
    releaser = EventReleaser(driver)
    yield releaser
    gc.collect()
    gpu.advance_all()
    releaser.close()
