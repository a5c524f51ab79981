"""A process that makes one tensor on the GPU and hands it over.

Arguments: SOCKET MEMORY HASH ROWS WIDTH DTYPE.

The kernel that fills it comes after one that takes long, so a copy that does not wait for it is wrong.
"""

import sys
from dataclasses import dataclass

import torch

from triptych_common.protocol.store import Reserve, Reserved, Seal
from triptych_common.region import RegionMapping
from triptych_common.region.cuda.loading import load_driver
from triptych_common.region.cuda.slab import SlabMapping
from triptych_common.region.cuda.transports import PinnedWriter, RegisteredRegion, SlabWriter, TorchDevice
from triptych_common.region.tensor_view import tensor_spec
from triptych_common.region.transport import TensorWriter
from triptych_common.store_session import StoreSession

SLEEP_CYCLES = 500_000_000  # some 0.3 s


@dataclass(frozen=True)
class Order:
    mm_hash: str
    generation: int
    offset: int


def pattern(rows: int, width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Different in every row and column, exact in every dtype."""
    values = torch.arange(rows * width, device=device).view(rows, width)
    return (values % 251 - 125).to(dtype)


def main() -> None:
    socket, memory, mm_hash, rows, width, dtype = sys.argv[1:]
    driver, device = load_driver(), TorchDevice()
    session = StoreSession.connect(socket, "encoder-0/worker-0")
    tensor = torch.empty(int(rows), int(width), dtype=getattr(torch, dtype), device="cuda")
    reserved = session.request(Reserve(seq=0, mm_hash=mm_hash, spec=tensor_spec(tensor), memory=memory))
    if not isinstance(reserved, Reserved):
        raise TypeError(f"no reservation: {reserved}")
    order = Order(mm_hash, reserved.generation, reserved.offset)
    welcome = session.welcome
    writer: TensorWriter
    if memory == "shm":
        region = RegionMapping.open(welcome.region_path, welcome.region_num_bytes)
        writer = PinnedWriter(driver, device, RegisteredRegion(driver, region))
    else:
        if welcome.slab is None:
            raise RuntimeError("the store has no slab")
        slab = SlabMapping(driver, welcome.slab, welcome.generation)
        writer = SlabWriter(driver, device, lambda: slab)
    torch.cuda._sleep(SLEEP_CYCLES)
    tensor.copy_(pattern(int(rows), int(width), tensor.dtype, "cuda"))
    writer.write(order, tensor)
    session.request(Seal(seq=0, reservation_id=reserved.reservation_id))
    session.close()


if __name__ == "__main__":
    main()
