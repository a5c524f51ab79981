"""In place of `EncodeEngine`: an encoder whose result follows from the media alone.

The worker is the real one (`WritingWorker`: one copy into the region, then the seal), in this process.
"""

import asyncio
from pathlib import Path

import torch

from tests.support.fast.processes.tally import note_encode
from tests.support.fast.processes.tensors import DTYPE, MAX_GRID, WIDTH, grid_of, tensor_bytes
from tests.support.item_records import IMAGE_LIMITS, item_record
from triptych_common.protocol.messages import EncodeJob
from triptych_encoder.encoding import BadMediaError, PreparedItem
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.step_orders import WriteOrder
from triptych_vllm_connector.worker.writing import WritingWorker


class FastEncodeEngine:
    """`Encoder`. Each encode takes `encode_s` seconds, and is noted in `tally`."""

    dtype = DTYPE
    max_num_tokens = 4096
    item_limits = IMAGE_LIMITS
    max_item_embeds = MAX_GRID * MAX_GRID

    def __init__(self, config: ConnectorConfig, encode_s: float, tally: Path) -> None:
        self._worker = WritingWorker(config, 0)
        self._encode_s = encode_s
        self._tally = tally

    def num_pixels(self, job: EncodeJob) -> int:
        return job.image.num_pixels if job.image is not None else 0

    async def preprocess(self, job: EncodeJob, media: bytes) -> PreparedItem:
        try:
            grid = grid_of(media)
        except OSError as error:
            raise BadMediaError("the bytes are not an image that can be decoded") from error
        num_rows = grid[1] * grid[2]
        record = item_record(num_rows, grid)
        return PreparedItem({"media": media}, num_rows, num_rows + 2, WIDTH, record)

    async def encode(self, prepared: PreparedItem, order: WriteOrder) -> None:
        note_encode(self._tally, order.mm_hash, order.job_id)
        await asyncio.sleep(self._encode_s)  # the work
        raw = bytearray(tensor_bytes(prepared.engine_input["media"], order.num_embeds))
        tensor = torch.frombuffer(raw, dtype=torch.float32).view(order.num_embeds, WIDTH)
        self._worker.on_encode_start()
        self._worker.write_order(order, tensor)

    async def check_health(self) -> None:
        return

    def close(self) -> None:
        self._worker.close()
