"""The encoder's vLLM engine: preprocesses in this process, encodes in vLLM's.

Preprocessing comes first and apart (`preprocessing`), so that an item's rows are exact, and its form is
checked, before vLLM schedules anything.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMError
from vllm.multimodal.video import get_video_loader_backend_for_processor
from vllm.renderers.base import BaseRenderer
from vllm.transformers_utils.processor import get_video_processor_cls_name
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from triptych_common.domain.transient import is_transient
from triptych_common.protocol.messages import Compute, EncodeJob, Modality, Role
from triptych_common.telemetry.logs import get_logger
from triptych_encoder.encoding import (
    EncodeRefusedError,
    EngineFailedError,
    PreparedItem,
    PreprocessFailedError,
    PreprocessLimits,
)
from triptych_encoder.preprocessing.preprocessor import Preprocessor, Rendered
from triptych_vllm_connector.host.engine_options import (
    check_division,
    check_engine_options,
    check_has_media,
    parse_options,
)
from triptych_vllm_connector.host.model_facts import encoder_cache_embeds, item_limits, placeholder_text
from triptych_vllm_connector.pieces import divide_position, piece_hashes
from triptych_vllm_connector.records.positions import PositionCheck
from triptych_vllm_connector.records.recording import ItemRecorder
from triptych_vllm_connector.records.video_steps import NotInStepsError, cut_steps, num_steps, steps_of_pieces
from triptych_vllm_connector.seams.replacing import replace
from triptych_vllm_connector.slab_probe import PROBE_SLAB
from triptych_vllm_connector.step_orders import WriteOrder
from triptych_vllm_connector.worker.rpc import CHECK_STEPS, ENCODER_WIDTHS, WAIT_WRITTEN, compute_of
from triptych_vllm_connector.worker.step_check import StepCheck

log = get_logger(__name__)

WRITE_TIMEOUT_S = 60.0  # of the steps that the GPU has in work
BEHIND_ITEM = "."  # in the prompt: some models' positions count the token behind an item to it


@dataclass(frozen=True)
class VideoPieces:
    """Divides prepared videos of one model; `positions` checks that the engine can place each piece.

    Each piece is an item of vLLM with some steps of the video's grid; not for towers that mix steps.
    """

    positions: PositionCheck

    def divide(self, prepared: PreparedItem, piece_rows: int) -> PreparedItem:
        """Add pieces if the item can be divided and is long enough for several of `piece_rows` rows.

        Raises:
            PreprocessFailedError: for want of memory, for example.
        """
        modality = Modality.VIDEO.value
        (item,) = prepared.engine_input["mm_kwargs"][modality]
        try:
            steps = _divided_steps(item, prepared.num_embeds, piece_rows)
            if len(steps) < 2:
                return prepared
            rows_of_step = prepared.num_embeds // sum(steps)
            rows = [rows_of_step * each for each in steps]
            ends = [sum(steps[:number]) for number in range(len(steps) + 1)]
            items = [cut_steps(item, first, end) for first, end in pairwise(ends)]
            inputs = _inputs_of(prepared.engine_input, modality, items, rows)
            for each in inputs:
                self._check(each, modality)
        except Exception as error:  # NotInStepsError, or whatever the model's code makes of a part
            if is_transient(error):  # otherwise the item would be divided only sometimes
                raise PreprocessFailedError("the video was not divided") from error
            log.info("video not divided", error=repr(error)[:500])
            return prepared
        record = prepared.record.model_copy(update={"pieces": tuple(rows)})
        pieces = (
            PreparedItem(each, num_rows, len(each["prompt_token_ids"]), prepared.width, record)
            for each, num_rows in zip(inputs, rows, strict=True)
        )
        return dataclasses.replace(prepared, record=record, pieces=tuple(pieces))

    def _check(self, engine_input: dict[str, Any], modality: str) -> None:
        """Raise ValueError if the engine could not find the item's positions in its prompt."""
        (position,) = engine_input["mm_placeholders"][modality]
        (item,) = engine_input["mm_kwargs"][modality]
        tokens = engine_input["prompt_token_ids"][position.offset : position.offset + position.length]
        self.positions.check(modality, item, tokens, position.is_embed)


def _divided_steps(item: Any, num_rows: int, piece_rows: int) -> list[int]:
    """Steps of each piece; raises NotInStepsError if rows and steps do not match."""
    num = num_steps(item)
    rows_of_step, rest = divmod(num_rows, num)
    if rest or not rows_of_step:
        raise NotInStepsError("the rows are not as many for each step")
    return steps_of_pieces(num, rows_of_step, piece_rows)


def _inputs_of(
    engine_input: Any, modality: str, items: Sequence[Any], rows: Sequence[int]
) -> list[dict[str, Any]]:
    """One vLLM input for each piece: the prompt with that piece in place of the video.

    A piece keeps the text tokens on both of its sides: some models use them to find its rows' places.
    """
    tokens = list(engine_input["prompt_token_ids"])
    (mm_hash,) = engine_input["mm_hashes"][modality]
    (position,) = engine_input["mm_placeholders"][modality]
    behind_all = tokens[position.offset + position.length :]
    inputs = []
    first = position.offset
    for item, piece_hash, place in zip(
        items, piece_hashes(mm_hash, rows), divide_position(position, rows), strict=True
    ):
        end = place.offset + place.length
        mask = position.is_embed
        if mask is not None:
            mask = mask[first - position.offset : end - position.offset]
        inputs.append(
            {
                **engine_input,
                "prompt_token_ids": [*tokens[: position.offset], *tokens[first:end], *behind_all],
                "mm_kwargs": type(engine_input["mm_kwargs"])({modality: [item]}),
                "mm_hashes": {modality: [piece_hash]},
                "mm_placeholders": {
                    modality: [dataclasses.replace(position, length=end - first, is_embed=mask)]
                },
            }
        )
        first = _end_of_rows(place)
    return inputs


def _end_of_rows(place: Any) -> int:
    """First token after the piece's last row."""
    if place.is_embed is None:
        return int(place.offset + place.length)
    return int(place.offset + place.is_embed.nonzero().max()) + 1


class EncodeEngine:
    """Owns the `AsyncLLM`; outputs are [num_embeds, width of the modality] of `dtype`."""

    def __init__(self, llm: AsyncLLM, limits: PreprocessLimits) -> None:
        self._llm = llm
        model_config = llm.vllm_config.model_config
        video_backend = get_video_loader_backend_for_processor(get_video_processor_cls_name(model_config))
        self._preprocessor = Preprocessor(self._render, limits, video_backend)
        declared_fields = llm.renderer.get_mm_processor().info.data_parser.placeholder_metadata_fields
        self._recorder = ItemRecorder(declared_fields)
        users = (BaseRenderer._process_multimodal,)
        replace(llm.renderer, "_mm_processor_cache", self._recorder, used_by=users)
        self.dtype = str(model_config.dtype).removeprefix("torch.")
        self.widths: dict[str, int] = {}  # by modality
        self._pieces: VideoPieces | None = None  # None: the model's videos cannot be divided
        self.max_item_embeds = encoder_cache_embeds(llm.vllm_config)  # rows of the largest item it takes

    @property
    def max_num_tokens(self) -> int:
        """Exclusive limit of a prompt's tokens."""
        return int(self._llm.vllm_config.model_config.max_model_len)

    async def measure_widths(self) -> None:
        """Ask the engine's workers for the columns of encoder outputs (wider than hidden with DeepStack).

        Raises:
            EngineFailedError: the engine could not encode a dummy item.
        """
        reports = [widths for widths in await self._llm.collective_rpc(ENCODER_WIDTHS) if widths]
        if not reports or any(report != reports[0] for report in reports):
            raise EngineFailedError(f"expected the same encoder output widths everywhere, measured {reports}")
        self.widths = reports[0]

    @property
    def item_limits(self) -> dict[Modality, int]:
        limits = item_limits(self._llm.renderer.get_mm_processor())
        return {each: limits[each] for each in self._preprocessor.modalities}

    @property
    def unserved_modalities(self) -> Mapping[Modality, str]:
        """Modalities of the model without any served item, each with the reason."""
        return self._preprocessor.unserved

    async def learn_item_schemas(self) -> None:
        """See `Preprocessor.learn_item_schemas`; waits for vLLM's own warm-up."""
        renderer = self._llm.renderer
        await asyncio.to_thread(renderer._join_mm_warmup)  # it uses the processor in a thread of its own
        await self._preprocessor.learn_item_schemas(item_limits(renderer.get_mm_processor()))

    async def check_steps(self) -> None:
        """Check on the tower that the model's videos can be encoded in pieces."""
        if Modality.VIDEO not in self._preprocessor.modalities:
            return
        reports = [StepCheck(**fields) for fields in await self._llm.collective_rpc(CHECK_STEPS)]
        why = next((report.why for report in reports if report.why), "")
        if not why:
            self._pieces = VideoPieces(PositionCheck.of_model(self._llm.vllm_config.model_config))
        difference = max((report.difference for report in reports), default=0.0)
        log.info("video steps checked", are_apart=not why, why=why, difference=difference)

    def num_pixels(self, job: EncodeJob) -> int:
        """See `Preprocessor.num_pixels` for the meaning."""
        return self._preprocessor.num_pixels(job)

    async def preprocess(self, job: EncodeJob, media: bytes) -> PreparedItem:
        """See `Preprocessor.prepare`; a long video is divided, if the model allows it."""
        prepared = await self._preprocessor.prepare(job, media)
        if self._pieces is None or not job.piece_rows or job.modality is not Modality.VIDEO:
            return prepared
        return await asyncio.to_thread(self._pieces.divide, prepared, job.piece_rows)

    def _render(
        self, modality: Modality, media: Any, mm_hash: str, processor_options: Mapping[str, Any]
    ) -> Rendered:
        """Run the model's processor. Blocks; one thread at a time."""
        self._recorder.forget()
        prompt: Any = {
            "prompt": placeholder_text(self._llm.renderer.get_mm_processor(), modality) + BEHIND_ITEM,
            "multi_modal_data": {modality.value: [media]},
            "multi_modal_uuids": {modality.value: [mm_hash]},
            "mm_processor_kwargs": dict(processor_options),
        }
        (engine_input,) = self._llm.renderer.render_cmpl([prompt])
        # vLLM rehashes a uuid that comes with processor options; ours has them folded in already.
        engine_input["mm_hashes"] = {modality.value: [mm_hash]}
        (position,) = engine_input["mm_placeholders"][modality]
        (item,) = engine_input["mm_kwargs"][modality]
        prepared = PreparedItem(
            engine_input,
            num_embeds=position.get_num_embeds(),
            num_tokens=len(engine_input["prompt_token_ids"]),
            width=self.widths[modality],
            record=self._recorder.take_record(),
        )
        return Rendered(prepared, item)

    async def encode(self, prepared: PreparedItem, order: WriteOrder) -> None:
        """Run the encoder; its worker writes into the reservation and seals it, on a GPU perhaps later.

        Raises:
            EncodeRefusedError: vLLM does not take the item, and no worker writes for it any more.
            EngineFailedError: the engine is dead, or its workers do not answer.
        """
        params = SamplingParams(
            max_tokens=1, detokenize=False, extra_args={"ec_transfer_params": asdict(order)}
        )
        try:
            async for _ in self._llm.generate(prepared.engine_input, params, order.job_id):
                pass
        except EngineDeadError as error:
            raise EngineFailedError(f"the encoder's engine died: {error}") from error
        except (VLLMError, ValueError) as error:
            await self._wait_until_ended(order.job_id)
            raise EncodeRefusedError("the encoder's engine refused the item") from error

    async def is_writing(self) -> bool:
        """True while a GPU writes items of steps for which the engine has answered.

        Raises:
            EngineFailedError: the GPU has failed, or the engine is dead.
        """
        return not await self._wait_written(0.0)

    async def _wait_written(self, timeout_s: float) -> bool:
        try:
            return all(await self._llm.collective_rpc(WAIT_WRITTEN, args=(timeout_s,)))
        except Exception as error:  # whatever vLLM makes of a call
            raise EngineFailedError(f"the encoder's workers cannot write: {error}") from error

    async def _wait_until_ended(self, engine_request_id: str) -> None:
        """Wait until no worker can write for a request that failed here but may be in a step.

        EngineCore handles messages in order, and so do the workers: after the abort no new step has the
        request, and the answer comes behind the steps that had it, and what the GPU writes for them.

        Raises:
            EngineFailedError: it is not known whether a worker writes; the end of the engine ends it.
        """
        try:
            await self._llm.abort(engine_request_id)
        except Exception as error:  # whatever vLLM makes of a call
            raise EngineFailedError(f"the encoder's workers do not answer: {error}") from error
        if not await self._wait_written(WRITE_TIMEOUT_S):
            raise EngineFailedError(f"the GPU has not written an item after {WRITE_TIMEOUT_S} s")

    async def probe_slab(self) -> dict[str, Any]:
        """Probe the store's memory on the worker's GPU; returns fields of a `SlabProbeResult`."""
        answer: dict[str, Any] = await self._llm.engine_core.call_utility_async(PROBE_SLAB)
        return answer

    async def compute(self) -> Compute | None:
        """Compute resources of the engine's worker."""
        return await compute_of(self._llm)

    async def check_health(self) -> None:
        """Raise EngineFailedError if the engine is dead, or preprocessing is stuck."""
        self._preprocessor.check_health()
        try:
            await self._llm.check_health()
        except EngineDeadError as error:
            raise EngineFailedError(f"the encoder's engine died: {error}") from error


@asynccontextmanager
async def run_engine(options: list[str], limits: PreprocessLimits) -> AsyncIterator[EncodeEngine]:
    """Start vLLM with these command-line options, and shut it down at the end.

    Raises:
        TriptychError: an option cannot be served, or the engine does not work.
    """
    args = parse_options(options)
    check_engine_options(args)
    check_division(args, Role.ENCODE)
    check_has_media(args)
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
    try:
        engine = EncodeEngine(llm, limits)
        await engine.measure_widths()
        await engine.learn_item_schemas()
        await engine.check_steps()
        log.info("engine ready", widths=engine.widths, dtype=engine.dtype, torch=torch.__version__)
        yield engine
    finally:
        llm.shutdown()
