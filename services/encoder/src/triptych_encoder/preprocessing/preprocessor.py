"""Turns a job and its media into an item for the tower, bounded in pixels and in time.

options -> decoded (`media_decoders`) -> rendered by vLLM -> of the learned form (`item_schema`)

All but the first step run in a thread (`bounded_threads`). Errors tell faults of the media from others; the
caller's text never has a library's own message.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from PIL import Image
from vllm.multimodal.media.base import MediaWithBytes

from triptych_common.domain.media_options import OptionRules, refused_option
from triptych_common.domain.transient import is_transient
from triptych_common.protocol.messages import EncodeJob, Modality
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
from triptych_encoder.preprocessing.item_schema import ItemMismatchError, ItemSchema, Sample, parts_of
from triptych_encoder.preprocessing.media_decoders import MediaDecoders

log = get_logger(__name__)

MIN_REFERENCES = 3  # of a modality, that the model takes

# (width, height): square, wide and tall.
IMAGE_SIZES = ((40, 40), (224, 224), (448, 300), (336, 672), (900, 220), (1024, 768))
# (frames, width, height, frames a second)
VIDEOS = ((2, 112, 112, 1.0), (4, 224, 112, 2.0), (8, 112, 224, 4.0), (6, 160, 96, 24.0), (3, 320, 240, 30.0))
# (seconds, samples a second)
# Models cut audio into pieces, of 30 s as a rule, or pad it to a length of minutes.
AUDIO = tuple((seconds, 16_000) for seconds in (0.5, 1.0, 2.7, 11.3, 31.0, 65.0, 310.0))

GREY = 127


def reference_media(modality: Modality) -> Mapping[str, Any]:
    """Reference media by name (for logs), as decoders give them to vLLM's renderer.

    Every property of an item that depends on the size of its media must differ among them.
    """
    if modality is Modality.IMAGE:
        return {f"{width}x{height}": _image(width, height) for width, height in IMAGE_SIZES}
    if modality is Modality.VIDEO:
        return {f"{each[0]} frames of {each[1]}x{each[2]}": _video(*each) for each in VIDEOS}
    return {f"{seconds} s": _audio(seconds, rate) for seconds, rate in AUDIO}


def _image(width: int, height: int) -> Any:
    return MediaWithBytes(Image.new("RGB", (width, height), (GREY, GREY, GREY)), b"reference")


def _video(num_frames: int, width: int, height: int, fps: float) -> Any:
    frames = np.full((num_frames, height, width, 3), GREY, dtype=np.uint8)
    metadata = {
        "total_num_frames": num_frames,
        "fps": fps,
        "duration": num_frames / fps,
        "video_backend": "opencv",
        "frames_indices": list(range(num_frames)),
        "do_sample_frames": False,
    }
    return MediaWithBytes((frames, metadata), b"reference")


def _audio(seconds: float, rate: int) -> Any:
    return np.zeros(int(seconds * rate), dtype=np.float32), rate


@dataclass(frozen=True)
class Rendered:
    """Output of the model's processor for one item."""

    prepared: PreparedItem
    item: Mapping[str, Any]  # vLLM's `MultiModalKwargsItem`, inside `prepared` too


Render = Callable[[Modality, Any, str, Mapping[str, Any]], Rendered]
"""Runs the model's processor on (modality, media, mm_hash, options); blocks, and raises third-party errors.
"""


class Preprocessor:
    """Preprocesses items; takes none before `learn_item_schemas`."""

    def __init__(self, render: Render, limits: PreprocessLimits, video_backend: str | None = None) -> None:
        """`video_backend` is described at `VideoDecoder.backend`."""
        self._render = render
        self._limits = limits
        self._decoders = MediaDecoders(limits, video_backend)
        self._threads = BoundedThreads(
            limits.num_pixels, limits.timeout_s, limits.stuck_after_s, limits.num_threads, LARGE_PIXELS
        )
        self._render_lock = threading.Lock()  # neither processors nor tokenizers take two threads
        self._schemas: dict[Modality, ItemSchema] = {}
        self.unserved: dict[Modality, str] = {}  # modalities of the model that are not taken, and why

    @property
    def modalities(self) -> tuple[Modality, ...]:
        return tuple(self._schemas)

    async def learn_item_schemas(self, modalities: Iterable[Modality]) -> None:
        """Learn the form of items by preprocessing reference media.

        Raises:
            EngineFailedError: too few of them could be preprocessed, of any modality.
        """
        for modality in modalities:
            failure: BaseException | None = None
            samples: list[Sample] = []
            for name, media in reference_media(modality).items():
                work = partial(self._process, modality, media, "reference", {})
                try:
                    rendered = await self._threads.run(0, work)
                except (BadMediaError, PreprocessFailedError) as error:  # e.g. larger than the context
                    failure = error.__cause__ or error
                    log.info("reference not taken", modality=modality, media=name, error=repr(failure)[:500])
                    continue
                samples.append(Sample(parts_of(rendered.item), rendered.prepared.num_embeds))
            if len(samples) >= MIN_REFERENCES:
                self._schemas[modality] = ItemSchema(samples)
            else:
                log.warning("modality not served", modality=modality, error=repr(failure)[:500])
                self.unserved[modality] = f"the model's processor takes too few of our media: {failure!r}"
        if not self._schemas:
            raise EngineFailedError(f"no media are served: {self.unserved}"[:1000])

    async def prepare(self, job: EncodeJob, media: bytes) -> PreparedItem:
        """Preprocess one item, off the event loop.

        Raises:
            BadMediaError: not the media that the job names, or the processor refuses them.
            PreprocessFailedError: not in time, or for want of memory.
        """
        if job.modality not in self._schemas:
            raise BadMediaError(f"the model takes no media of type {job.modality}")
        _check_options(job.mm_processor_kwargs, self._limits.processor_options)
        _check_options(job.media_io_kwargs, self._limits.media_options.get(job.modality, {}))
        self._decoders.check(job)
        return (await self._threads.run(self.num_pixels(job), partial(self._work, job, media))).prepared

    def num_pixels(self, job: EncodeJob) -> int:
        """Pixels of the item's media, or the most that its options allow; 0 if it is about to be refused."""
        num_pixels = self._decoders.num_pixels(job)
        rules, options = self._limits.processor_options, job.mm_processor_kwargs
        # A processor enlarges an image up to `min_pixels`.
        allowed = (math.ceil(rules[name].largest) for name in options if "pixels" in name and name in rules)
        return max(num_pixels, *allowed, 0) if num_pixels else 0

    def check_health(self) -> None:
        """Raise EngineFailedError if a thread is stuck."""
        self._threads.check()

    def _work(self, job: EncodeJob, media: bytes) -> Rendered:
        """Decode and process one item. Blocks."""
        began = time.perf_counter()
        decoded = self._decoders.decode(job, media)
        decode_s = time.perf_counter() - began
        rendered = self._process(job.modality, decoded, job.mm_hash, job.mm_processor_kwargs)
        return replace(rendered, prepared=replace(rendered.prepared, decode_s=decode_s))

    def _process(
        self, modality: Modality, decoded: Any, mm_hash: str, processor_options: Mapping[str, Any]
    ) -> Rendered:
        """Run the model's processor and check the result. Blocks."""
        try:
            with self._render_lock:
                rendered = self._render(modality, decoded, mm_hash, processor_options)
            if modality in self._schemas:
                self._schemas[modality].check(rendered.item, rendered.prepared.num_embeds)
        except ItemMismatchError as error:
            raise BadMediaError("the processor makes of it what the encoder cannot take") from error
        except Exception as error:  # whatever third-party code makes of a stranger's media
            if is_transient(error):
                raise PreprocessFailedError("the encoder had no resources to process the item") from error
            raise BadMediaError("the model's processor refused the item") from error
        return rendered


def _check_options(options: Mapping[str, Any], rules: OptionRules) -> None:
    """Raise BadMediaError for options that the gateway should have refused."""
    refusal = refused_option(options, rules)
    if refusal is not None:
        raise BadMediaError(f"the option {refusal.name} {refusal.reason}")
