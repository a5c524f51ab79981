"""The vLLM engine of the encoder: preprocess in this process, encode in vLLM's.

Preprocessing comes first and apart, so that an item's rows are exact, and its form is checked, before vLLM
schedules anything. It is bounded in pixels and in time (`bounded_threads`).
"""

import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from io import BytesIO
from typing import Any

import torch
from PIL import Image
from vllm import SamplingParams
from vllm.distributed.ec_transfer.ec_connector.utils import (
    PlaceholderMetadataResolver,
    collect_ec_item_metadata,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.exceptions import VLLMError
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from triptych_common.domain.media_options import OptionRules, refused_option
from triptych_common.domain.transient import is_transient
from triptych_common.protocol.messages import EncodeJob, ImageProperties, Modality
from triptych_common.telemetry.logs import get_logger
from triptych_encoder.bounded_threads import BoundedThreads
from triptych_encoder.decoding import ImageDecoder
from triptych_encoder.encoding import (
    BadMediaError,
    EncodeRefusedError,
    EngineFailedError,
    PreparedItem,
    PreprocessFailedError,
    PreprocessLimits,
)
from triptych_encoder.item_schema import ItemMismatchError, ItemSchema, Sample, parts_of
from triptych_vllm_connector.limits import encoder_cache_embeds
from triptych_vllm_connector.orders import WriteOrder
from triptych_vllm_connector.unsupported_options import check_engine_options
from triptych_vllm_connector.worker_rpc import ENCODER_WIDTHS

log = get_logger(__name__)

# (width, height) of images of our own: small and large, square, wide and tall, so that whatever depends on
# the image's size is seen to.
REFERENCE_SIZES = ((40, 40), (224, 224), (448, 300), (336, 672), (900, 220), (1024, 768))
MIN_REFERENCES = 3  # of them, that the model takes


class EncodeEngine:
    """Owns the `AsyncLLM`. `width` and `dtype` describe every output it makes: [num_embeds, width]."""

    def __init__(self, llm: AsyncLLM, limits: PreprocessLimits) -> None:
        self._llm = llm
        self._limits = limits
        self._decoder = ImageDecoder(limits.image_formats, limits.max_image_pixels)
        self._threads = BoundedThreads(limits.num_pixels, limits.timeout_s, limits.stuck_after_s)
        self._processor_lock = threading.Lock()  # neither processors nor tokenizers take two threads
        self._schema: ItemSchema | None = None  # until it is learned, nothing is checked
        model_config = llm.vllm_config.model_config
        self._resolver = PlaceholderMetadataResolver(model_config)
        self._model_cls: Any = get_model_cls(model_config)
        self.dtype = str(model_config.dtype).removeprefix("torch.")
        self.width = 0
        self._max_item_embeds = encoder_cache_embeds(llm.vllm_config)

    @property
    def max_num_tokens(self) -> int:
        """A prompt must be shorter than this."""
        return int(self._llm.vllm_config.model_config.max_model_len)

    @property
    def max_item_embeds(self) -> int:
        """Rows of the largest item that the engine takes."""
        return self._max_item_embeds

    async def measure_width(self) -> None:
        """Ask the engine's workers for the columns of an encoder output (wider than hidden with DeepStack).

        Raises:
            EngineFailedError: the engine could not encode a dummy item.
        """
        reports = [widths for widths in await self._llm.collective_rpc(ENCODER_WIDTHS) if widths]
        widths = {width for report in reports for width in report.values()}
        if len(widths) != 1:
            raise EngineFailedError(f"expected one encoder output width, measured {sorted(widths)}")
        self.width = widths.pop()

    async def learn_item_schema(self) -> None:
        """Preprocess images of our own: their form is what the tower takes.

        Raises:
            EngineFailedError: too few of them could be preprocessed.
        """
        samples: list[Sample] = []
        for width, height in REFERENCE_SIZES:
            reference = BytesIO()
            Image.new("RGB", (width, height), (127, 127, 127)).save(reference, "PNG")
            image = ImageProperties(format="PNG", width=width, height=height)
            work = partial(self._prepare, reference.getvalue(), image, "reference", {}, {})
            try:
                prepared = await self._threads.run(image.num_pixels, work)
            except (BadMediaError, PreprocessFailedError) as error:  # e.g. larger than its context
                log.info("reference image not taken", width=width, height=height, error=_cause(error))
                continue
            item = prepared.engine_input["mm_kwargs"][Modality.IMAGE.value][0]
            samples.append(Sample(parts_of(item), prepared.num_embeds))
        if len(samples) < MIN_REFERENCES:
            raise EngineFailedError("the model's processor takes none of the reference images")
        self._schema = ItemSchema(samples)

    async def preprocess(self, job: EncodeJob, media: bytes) -> PreparedItem:
        """Decode the media and run the model's processor, off the event loop.

        Raises:
            BadMediaError: not the media that the job names, or the processor refuses them.
            PreprocessFailedError: not in time, or for want of memory.
        """
        if job.modality is not Modality.IMAGE:
            raise BadMediaError(f"media of type {job.modality} cannot be encoded yet")
        _check_options(job.mm_processor_kwargs, self._limits.processor_options)
        _check_options(job.media_io_kwargs, self._limits.image_options)
        image = self._decoder.check(job.image)
        work = partial(self._prepare, media, image, job.mm_hash, job.mm_processor_kwargs, job.media_io_kwargs)
        return await self._threads.run(image.num_pixels, work)

    def _prepare(
        self,
        media: bytes,
        image: ImageProperties,
        mm_hash: str,
        processor_options: Mapping[str, Any],
        image_options: Mapping[str, Any],
    ) -> PreparedItem:
        """Blocks."""
        pixels = self._decoder.decode(media, image, image_options)
        modality = Modality.IMAGE.value
        prompt = {
            "prompt": self._model_cls.get_placeholder_str(modality, 1),
            "multi_modal_data": {modality: [pixels]},
            "multi_modal_uuids": {modality: [mm_hash]},
            "mm_processor_kwargs": dict(processor_options),
        }
        try:
            return self._process(prompt, modality, mm_hash)
        except ItemMismatchError as error:
            raise BadMediaError(
                f"the model's processor makes of the {modality} what its tower does not take"
            ) from error
        except Exception as error:  # whatever third-party code makes of a stranger's media
            if is_transient(error):
                raise PreprocessFailedError(f"the encoder had no resources for the {modality}") from error
            raise BadMediaError(f"the model's processor refused the {modality}") from error

    def _process(self, prompt: Mapping[str, Any], modality: str, mm_hash: str) -> PreparedItem:
        with self._processor_lock:
            (engine_input,) = self._llm.renderer.render_cmpl([prompt])
        # vLLM rehashes a uuid that comes with processor options; ours has them folded in already.
        engine_input["mm_hashes"] = {modality: [mm_hash]}
        (position,) = engine_input["mm_placeholders"][modality]
        (item,) = engine_input["mm_kwargs"][modality]
        num_embeds = position.get_num_embeds()
        if self._schema is not None:
            self._schema.check(item, num_embeds)
        feature = MultiModalFeatureSpec(
            data=item, modality=modality, identifier=mm_hash, mm_position=position, mm_hash=mm_hash
        )
        metadata = collect_ec_item_metadata([feature], self._resolver)[mm_hash]["metadata"]
        return PreparedItem(
            engine_input, num_embeds, len(engine_input["prompt_token_ids"]), _unwrap(metadata)
        )

    async def encode(self, prepared: PreparedItem, order: WriteOrder) -> None:
        """Run the encoder; its worker writes into the reservation and seals it.

        Raises:
            EncodeRefusedError: vLLM does not take the item.
            EngineFailedError: the engine is dead.
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
            raise EncodeRefusedError("the encoder's engine refused the item") from error

    async def check_health(self) -> None:
        """Raises EngineFailedError when the engine is dead, or preprocessing is stuck."""
        self._threads.check()
        try:
            await self._llm.check_health()
        except EngineDeadError as error:
            raise EngineFailedError(f"the encoder's engine died: {error}") from error


def _unwrap(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """One item's fields: vLLM publishes `[[t, h, w]]`-like batches of one; the request wants the item."""
    return {key: value[0] if _is_batch_of_one(value) else value for key, value in metadata.items()}


def _is_batch_of_one(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 1 and isinstance(value[0], list)


def _check_options(options: Mapping[str, Any], rules: OptionRules) -> None:
    """Raises BadMediaError: the gateway should have refused them."""
    refusal = refused_option(options, rules)
    if refusal is not None:
        raise BadMediaError(f"the option {refusal.name} {refusal.reason}")


def _cause(error: Exception) -> str:
    return repr(error.__cause__ or error)[:500]


@asynccontextmanager
async def run_engine(options: list[str], limits: PreprocessLimits) -> AsyncIterator[EncodeEngine]:
    """Start vLLM with these command-line options; shut it down in the end.

    Raises:
        TriptychError: an option cannot be served, or the engine does not work.
    """
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(options)
    check_engine_options(args)
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
    try:
        engine = EncodeEngine(llm, limits)
        await engine.measure_width()
        await engine.learn_item_schema()
        log.info("engine ready", width=engine.width, dtype=engine.dtype, torch=torch.__version__)
        yield engine
    finally:
        llm.shutdown()
