"""The two sides of the stub: each is one worker, with what vLLM's runner does around it.

    python -m tests.support.cuda.stub.roles ROLE INSTANCE SOCKET DEVICE

serves one on "cuda" or "cpu": each line of stdin is a JSON object with a method's name and arguments, each
line of stdout one with its result or its error.
"""

import dataclasses
import json
import os
import queue
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.cuda.stub.devices import CudaStubDevice, HostStubDevice, StubDevice
from triptych_common.protocol.store import Descriptor
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.slab_probe import SlabProbeResult
from triptych_vllm_connector.step_orders import LoadOrder, WriteOrder
from triptych_vllm_connector.worker.loading import LoadingWorker
from triptych_vllm_connector.worker.writing import WritingWorker

MIB = 1 << 20
WIDTH = 2048
ROW_BYTES = 2 * WIDTH  # of bfloat16
ENCODER, PREFILL_DECODE = "encoder", "prefill_decode"


@dataclasses.dataclass(frozen=True)
class Written:
    """Result of `EncoderRole.write`; moments of `time.perf_counter`, one clock for all processes of Linux."""

    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True)
class Stepped:
    """Result of `PrefillDecodeRole.step`."""

    load_ms: float
    failed: list[str]  # mm_hashes


def worker_config(instance: str, socket: str) -> ConnectorConfig:
    return ConnectorConfig(
        instance=instance,
        deployment="d",
        redis_url="unix:///nowhere",
        store_socket=Path(socket),
        namespace_digest="0" * 64,
    )


def pattern(seed: int, rows: int, device: str) -> torch.Tensor:
    """Return [rows, WIDTH], exact in bfloat16, different in every row, column and seed."""
    index = torch.arange(rows * WIDTH, device=device, dtype=torch.int64)
    return ((index * 17 + seed * 31) % 251 - 125).to(torch.bfloat16).view(rows, WIDTH)


class EncoderRole:
    """The encoder's worker, and what vLLM's runner of an encoder does around it."""

    def __init__(
        self,
        instance: str,
        socket: str,
        device: StubDevice,
        own: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        """`own` makes a tensor one of the device's."""
        self._device = device
        self._own = own
        device.use_own_stream()
        self._worker = WritingWorker(worker_config(instance, socket), 0, device.worker_type)
        self._encoder_cache: dict[str, torch.Tensor] = {}

    def probe(self) -> SlabProbeResult:
        return self._worker.probe_slab()

    def write(self, order: Mapping[str, Any], seed: int, busy_ms: float = 0.0) -> Written:
        """Run one step with one item; `busy_ms` of other kernels come before the item's own."""
        write_order = WriteOrder(**order)
        mm_hash = write_order.mm_hash
        self._worker.on_step_start({mm_hash: [write_order]}, self._encoder_cache)
        self._worker.on_encode_start()
        self._device.keep_busy(busy_ms)
        tensor = self._own(pattern(seed, write_order.num_embeds, self._device.name))
        if not busy_ms:
            self._device.synchronize()  # what is timed is the handover alone
        self._encoder_cache[mm_hash] = tensor
        start_s = time.perf_counter()
        self._worker.on_encoded(mm_hash, tensor)
        self._worker.on_step_end()
        end_s = time.perf_counter()
        del self._encoder_cache[mm_hash]
        return Written(start_s, end_s)

    def free_bytes(self) -> int:
        return self._device.free_bytes()

    def close(self) -> None:
        self._worker.close()


class PrefillDecodeRole:
    """prefill_decode's worker, and what model runner V2 does around it.

    `step` launches a step, `collect` waits for the result of the oldest one.
    """

    def __init__(self, instance: str, socket: str, device: StubDevice) -> None:
        self._device = device
        device.use_own_stream()
        self._worker = LoadingWorker(worker_config(instance, socket), 0, device.worker_type)
        self._encoder_cache: dict[str, torch.Tensor] = {}
        self._results: queue.SimpleQueue[Callable[[], int]] = queue.SimpleQueue()  # of steps in flight
        self._inputs_embeds = torch.zeros(device.max_rows, WIDTH, dtype=torch.bfloat16, device=device.name)
        self._expected = torch.zeros_like(self._inputs_embeds)
        self._num_wrong = torch.zeros((), dtype=torch.int64, device=device.name)
        self._taken: torch.Tensor | None = None
        self._forward = device.captured(self._compare)

    def probe(self) -> SlabProbeResult:
        return self._worker.probe_slab()

    def step(
        self,
        drop: Sequence[str] = (),
        load: Sequence[Mapping[str, Any]] = (),
        gather: Sequence[tuple[str, int]] = (),
        busy_ms: float = 0.0,
    ) -> Stepped:
        """Drop items, load others, and compare the gathered ones with the patterns of their seeds."""
        for mm_hash in drop:
            self._encoder_cache.pop(mm_hash, None)
        start_s = time.perf_counter()
        self._worker.load_orders(self._encoder_cache, [_load_order(each) for each in load])
        load_ms = (time.perf_counter() - start_s) * 1e3
        failed = sorted(self._worker.take_failed_loads())
        self._worker.take_loaded()
        self._device.keep_busy(busy_ms)
        with torch.inference_mode():
            self._gather(gather)
            self._forward()
        self._results.put(self._device.fetch(self._num_wrong))
        return Stepped(load_ms, failed)

    def collect(self) -> int:
        """Wait for the oldest step in flight, and return how many of its numbers are wrong."""
        return self._results.get()()

    def time_load(self, busy_ms: float, load: Sequence[Mapping[str, Any]]) -> float:
        """Milliseconds of loading all but the first of `load` behind `busy_ms` of kernels, until all is done.

        The first one is loaded before, so that torch's pool has the memory.
        """
        first, *others = [_load_order(each) for each in load]
        self._worker.load_orders(self._encoder_cache, [first])
        self._device.synchronize()
        self._encoder_cache.clear()
        self._device.synchronize()
        start_s = time.perf_counter()
        self._device.keep_busy(busy_ms)
        self._worker.load_orders(self._encoder_cache, others)
        self._device.synchronize()
        elapsed_ms = (time.perf_counter() - start_s) * 1e3
        self._encoder_cache.clear()
        self._worker.take_failed_loads()
        self._worker.take_loaded()
        return elapsed_ms

    def longest_stop(self, item: str, busy_ms: float) -> float:
        """Longest stop of this thread, in milliseconds, while another waits for the GPU to release `item`."""
        self._device.keep_busy(busy_ms)
        del self._encoder_cache[item]
        last_s, longest_s = time.perf_counter(), 0.0
        while not self._device.is_done():
            now_s = time.perf_counter()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
        return longest_s * 1e3

    def take_memory(self, leave_mib: int) -> None:
        """Take the GPU's memory but for `leave_mib`, torch's unused blocks included."""
        torch.cuda.empty_cache()
        num_bytes = max(0, self._device.free_bytes() - leave_mib * MIB)
        self._taken = torch.empty(num_bytes, dtype=torch.uint8, device=self._device.name)

    def give_memory_back(self) -> None:
        self._taken = None
        torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        return self._device.free_bytes()

    def close(self) -> None:
        self._encoder_cache.clear()
        self._worker.close()

    def _gather(self, items: Sequence[tuple[str, int]]) -> None:
        self._inputs_embeds.zero_()
        self._expected.zero_()
        start = 0
        for mm_hash, seed in items:
            rows = self._encoder_cache[mm_hash].shape[0]
            is_item = torch.zeros(self._device.max_rows, dtype=torch.bool)
            is_item[start : start + rows] = True
            parts = self._encoder_cache[mm_hash].split(max(1, rows // 2))  # chunks of a prompt are slices
            self._inputs_embeds[self._device.on_cpu(is_item)] = torch.cat(parts)
            self._expected[start : start + rows] = pattern(seed, rows, self._device.name)
            start += rows

    def _compare(self) -> None:
        self._num_wrong.copy_((self._inputs_embeds != self._expected).sum())


Role = EncoderRole | PrefillDecodeRole
ROLES: Mapping[str, type[EncoderRole] | type[PrefillDecodeRole]] = {
    ENCODER: EncoderRole,
    PREFILL_DECODE: PrefillDecodeRole,
}


def answer(role: Role, method: str, arguments: Mapping[str, Any]) -> Any:
    """Call a role's method; dataclasses become objects, as they do on the way between processes."""
    result = getattr(role, method)(**arguments)
    is_record = dataclasses.is_dataclass(result) and not isinstance(result, type)
    return dataclasses.asdict(result) if is_record else result


def _load_order(fields: Mapping[str, Any]) -> LoadOrder:
    return LoadOrder(fields["mm_hash"], fields["pin_id"], Descriptor.model_validate(fields["descriptor"]))


def main() -> None:
    name, instance, socket, device_name = sys.argv[1:]
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)  # what libraries print goes where logs go
        device = CudaStubDevice() if device_name == "cuda" else HostStubDevice(device_name)
        role = ROLES[name](instance, socket, device)
        print(json.dumps({"result": os.getpid()}), file=replies, flush=True)
        for line in sys.stdin:
            call = json.loads(line)
            try:
                reply = {"result": answer(role, call["method"], call["arguments"])}
            except Exception as error:
                traceback.print_exc()
                reply = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(reply), file=replies, flush=True)
    role.close()


if __name__ == "__main__":
    main()
