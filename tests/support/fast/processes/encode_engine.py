"""In place of `EncodeEngine`: an encoder whose result follows from the media alone.

The worker is the real one (`WritingWorker`: one copy into the region, then the seal), in this process.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch

from tests.support.fast.processes.tally import note_encode
from tests.support.fast.processes.tensors import DTYPE, MAX_GRID, grid_of, tensor_chunks, width_of
from tests.support.item_records import IMAGE_LIMITS, item_record
from triptych_common.protocol.messages import EncodeJob, Modality
from triptych_encoder.encoding import BadMediaError, PreparedItem
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.pieces import row_ranges
from triptych_vllm_connector.step_orders import WriteOrder
from triptych_vllm_connector.worker.writing import WritingWorker


class FastEncodeEngine:
    """`Encoder`. Each encode takes `encode_s` seconds, in all of its pieces, and is noted in `tally`.

    A model's work is another process's: what the tensor costs here is within that time.
    """

    dtype = DTYPE
    max_num_tokens = 4096
    item_limits = IMAGE_LIMITS
    unserved_modalities: Mapping[Modality, str] = MappingProxyType({})
    max_item_embeds = MAX_GRID * MAX_GRID

    def __init__(
        self, config: ConnectorConfig, encode_s: float, num_pieces: int, tally: Path, encodes_at_once: int
    ) -> None:
        self._worker = WritingWorker(config, 0)
        self._namespace = config.namespace_digest
        self._num_pieces = num_pieces
        self._encode_s = encode_s
        self._places = asyncio.Semaphore(encodes_at_once)
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
        pieces = _pieces_of(num_rows, self._num_pieces)
        record = record.model_copy(update={"pieces": pieces})

        def rows(first: int, end: int) -> PreparedItem:
            made = {"media": media, "mm_hash": job.mm_hash, "rows": (first, end), "num_rows": num_rows}
            return PreparedItem(made, end - first, end - first + 2, width_of(media), record)

        return replace(rows(0, num_rows), pieces=tuple(rows(*each) for each in row_ranges(pieces)))

    async def encode(self, prepared: PreparedItem, order: WriteOrder) -> None:
        made = prepared.engine_input
        first, end = made["rows"]
        job_id, _, _ = order.job_id.partition(".")
        note_encode(self._tally, made["mm_hash"], job_id, first)
        async with self._places:
            ends_at = time.monotonic() + self._encode_s * (end - first) / made["num_rows"]
            raw = bytearray()
            for chunk in tensor_chunks(made["media"], made["num_rows"], self._namespace):
                raw += chunk
                await asyncio.sleep(0)
            tensor = torch.frombuffer(raw, dtype=torch.float32).view(made["num_rows"], -1)[first:end]
            await asyncio.sleep(ends_at - time.monotonic())
        self._worker.on_encode_start()
        self._worker.write_order(order, tensor)

    async def is_writing(self) -> bool:
        return False

    async def check_health(self) -> None:
        return

    def close(self) -> None:
        self._worker.close()


def _pieces_of(num_rows: int, num_pieces: int) -> tuple[int, ...]:
    """Rows of each; () for one."""
    each, more = divmod(num_rows, num_pieces)
    return tuple(each + (number < more) for number in range(num_pieces)) if each and num_pieces > 1 else ()
