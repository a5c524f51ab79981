"""From a job and its media to an item that the tower takes, bounded in pixels and in time.

options -> decoded (`decoding`) -> rendered by vLLM -> of the learned form (`item_schema`)

All but the first step run in a thread (`bounded_threads`). What goes wrong is the media's fault, or not;
the caller's error keeps the two apart, and never has a library's own message.
"""

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any

from PIL import Image

from triptych_common.domain.media_options import OptionRules, refused_option
from triptych_common.domain.transient import is_transient
from triptych_common.protocol.messages import EncodeJob, ImageProperties, Modality
from triptych_common.telemetry.logs import get_logger
from triptych_encoder.encoding import (
    LARGE_PIXELS,
    BadMediaError,
    EngineFailedError,
    PreparedItem,
    PreprocessFailedError,
    PreprocessLimits,
)
from triptych_encoder.preprocessing.bounded_threads import BoundedThreads
from triptych_encoder.preprocessing.decoding import ImageDecoder
from triptych_encoder.preprocessing.item_schema import ItemMismatchError, ItemSchema, Sample, parts_of

log = get_logger(__name__)

# (width, height) of images of our own: small and large, square, wide and tall, so that whatever depends on
# the image's size is seen to.
REFERENCE_SIZES = ((40, 40), (224, 224), (448, 300), (336, 672), (900, 220), (1024, 768))
MIN_REFERENCES = 3  # of them, that the model takes


@dataclass(frozen=True)
class Rendered:
    """What the model's processor made of one image."""

    prepared: PreparedItem
    item: Mapping[str, Any]  # vLLM's `MultiModalKwargsItem`, inside `prepared` too


Render = Callable[[Any, str, Mapping[str, Any]], Rendered]
"""(pixels, mm_hash, processor options); blocks, and raises whatever third-party code raises."""


class Preprocessor:
    """Nothing is checked against a form until `learn_item_schema` was called."""

    def __init__(self, render: Render, limits: PreprocessLimits) -> None:
        self._render = render
        self._limits = limits
        self._decoder = ImageDecoder(limits.image_formats, limits.max_image_pixels)
        self._threads = BoundedThreads(
            limits.num_pixels, limits.timeout_s, limits.stuck_after_s, limits.num_threads, LARGE_PIXELS
        )
        self._render_lock = threading.Lock()  # neither processors nor tokenizers take two threads
        self._schema: ItemSchema | None = None

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
            work = partial(self._work, reference.getvalue(), image, "reference", {}, {})
            try:
                rendered = await self._threads.run(image.num_pixels, work)
            except (BadMediaError, PreprocessFailedError) as error:  # e.g. larger than the model's context
                log.info("reference image not taken", width=width, height=height, error=repr(error.__cause__))
                continue
            samples.append(Sample(parts_of(rendered.item), rendered.prepared.num_embeds))
        if len(samples) < MIN_REFERENCES:
            raise EngineFailedError("the model's processor takes too few of the reference images")
        self._schema = ItemSchema(samples)

    async def prepare(self, job: EncodeJob, media: bytes) -> PreparedItem:
        """Off the event loop.

        Raises:
            BadMediaError: not the media that the job names, or the processor refuses them.
            PreprocessFailedError: not in time, or for want of memory.
        """
        if job.modality is not Modality.IMAGE:
            raise BadMediaError(f"media of type {job.modality} cannot be encoded yet")
        _check_options(job.mm_processor_kwargs, self._limits.processor_options)
        _check_options(job.media_io_kwargs, self._limits.image_options)
        image = self._decoder.check(job.image)
        work = partial(self._work, media, image, job.mm_hash, job.mm_processor_kwargs, job.media_io_kwargs)
        cost = _num_pixels(image, job.mm_processor_kwargs, self._limits.processor_options)
        return (await self._threads.run(cost, work)).prepared

    def num_pixels(self, job: EncodeJob) -> int:
        """Of the image, or what its options may make of it; 0: it has none, and is about to be refused."""
        if job.image is None:
            return 0
        return _num_pixels(job.image, job.mm_processor_kwargs, self._limits.processor_options)

    def check_health(self) -> None:
        """Raises EngineFailedError when a thread is stuck."""
        self._threads.check()

    def _work(
        self,
        media: bytes,
        image: ImageProperties,
        mm_hash: str,
        processor_options: Mapping[str, Any],
        image_options: Mapping[str, Any],
    ) -> Rendered:
        """Blocks."""
        pixels = self._decoder.decode(media, image, image_options)
        try:
            with self._render_lock:
                rendered = self._render(pixels, mm_hash, processor_options)
            if self._schema is not None:
                self._schema.check(rendered.item, rendered.prepared.num_embeds)
        except ItemMismatchError as error:
            raise BadMediaError("the processor makes of it what the vision tower cannot take") from error
        except Exception as error:  # whatever third-party code makes of a stranger's media
            if is_transient(error):
                raise PreprocessFailedError("the encoder had no resources to process the image") from error
            raise BadMediaError("the model's processor refused the image") from error
        return rendered


def _num_pixels(image: ImageProperties, options: Mapping[str, Any], rules: OptionRules) -> int:
    """The image's, or what its options may make of it: a processor enlarges it up to `min_pixels`."""
    allowed = (math.ceil(rules[name].largest) for name in options if "pixels" in name and name in rules)
    return max(image.num_pixels, *allowed, 0)


def _check_options(options: Mapping[str, Any], rules: OptionRules) -> None:
    """Raises BadMediaError: the gateway should have refused them."""
    refusal = refused_option(options, rules)
    if refusal is not None:
        raise BadMediaError(f"the option {refusal.name} {refusal.reason}")
