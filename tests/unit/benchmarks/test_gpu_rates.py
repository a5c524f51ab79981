"""The GPU benchmark's arithmetic, and its run on a fake GPU. No rates asserted."""

import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.support.cuda.fake_cuda import FakeDevice, FakeDriver, FakeGpu
from triptych_common.protocol.store import Descriptor
from triptych_common.region.cuda.release import EventReleaser
from triptych_common.region.cuda.slab import DeviceSlab, SlabMapping
from triptych_common.region.cuda.transports import SlabReader, SlabWriter
from triptych_common.region.tensor_view import tensor_spec

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from gpu_rates.measuring import Compared, Passage, figure, measure, report, table

MIB = 1 << 20


@dataclass(frozen=True)
class Order:
    mm_hash: str = "ab" * 32
    generation: int = 1
    offset: int = 0


class FakeWay:
    """`cuda_ipc`, without a store."""

    name = "cuda_ipc"

    def __init__(self) -> None:
        self.gpu = FakeGpu(runs_by_itself=True)
        self.driver = FakeDriver(self.gpu)
        self.device = FakeDevice(self.driver)
        slab = SlabMapping(self.driver, DeviceSlab(FakeDriver(self.gpu), 4 * MIB).info, 1)
        self.memory = slab.info.memory
        self.writer = SlabWriter(self.driver, self.device, lambda: slab)
        self.reader = SlabReader(self.device, lambda: slab, EventReleaser(self.driver))
        self.num_handed_over = 0

    def hand_over(self, tensor: torch.Tensor) -> Passage:
        times = [time.perf_counter()]
        self.writer.write(Order(), self.device.own(tensor))
        times += [time.perf_counter()] * 2
        place = Descriptor(
            mm_hash=Order.mm_hash, spec=tensor_spec(tensor), offset=0, generation=1, memory=self.memory
        )
        released = threading.Event()
        assert torch.equal(self.reader.open(place, released.set), tensor)
        assert released.wait(5.0)
        times.append(time.perf_counter())
        self.num_handed_over += 1
        return Passage(times[1] - times[0], times[2] - times[1], times[3] - times[2])


def test_every_size_is_measured_beside_its_plain_copy() -> None:
    way = FakeWay()
    figures = measure(
        [way],
        {"device copy": lambda tensor: 0.001},
        {"cuda_ipc": Compared("device copy", None)},
        lambda mib: torch.randn(int(mib * MIB) // 256, 64),
        [0.25, 1],
        repeats=3,
    )
    assert [(each.way, each.mib, each.in_ratio) for each in figures] == [
        ("cuda_ipc", 0.25, None),
        ("cuda_ipc", 1, None),
    ]
    assert way.num_handed_over == 2 * (3 + 2)
    assert figures[1].plain_out_gb_s == pytest.approx(MIB / 0.001 / 1e9)
    way.gpu.assert_no_breach()


def test_ratios_are_to_the_copy_that_goes_the_same_way() -> None:
    rates = {"device to host": 20.0, "host to device": 25.0, "device copy": 2000.0}
    passage = Passage(write_s=1e-3, told_s=2e-4, open_s=8e-4)
    pinned = figure("pinned_shm", 16, [passage], Compared("device to host", "host to device"), rates)
    assert pinned.write_gb_s == pytest.approx(16.777216)
    assert pinned.out_ratio == pytest.approx(16.777216 / 20)
    assert pinned.in_ratio == pytest.approx(20.97152 / 25)
    ipc = figure("cuda_ipc", 16, [Passage(8.4e-6, 2e-4, 1e-5)], Compared("device copy", None), rates)
    assert ipc.out_ratio == pytest.approx(0.9986, abs=1e-3)
    result = report({"gpu": "fake"}, [pinned, ipc])
    assert result["cuda_ipc_reaches_target"]
    slow = figure("cuda_ipc", 1, [Passage(1.0, 0.0, 1.0)], Compared("device copy", None), rates)
    assert not report({}, [ipc, slow])["cuda_ipc_reaches_target"]
    assert not report({}, [pinned])["cuda_ipc_reaches_target"]
    lines = table([pinned, ipc]).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "none needed" not in lines[2]
    assert "none needed" in lines[3]
