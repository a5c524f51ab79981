"""Turns a job and its media into an item for the tower, bounded in pixels and in time.

options -> decoded (`media_decoders`) -> rendered by vLLM -> of the learned form (`item_schema`)

All but the first step run in a thread (`bounded_threads`). Errors tell faults of the media from others; the
caller's text never has a library's own message.
"""

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from triptych_encoder.preprocessing.references import MIN_REFERENCES, reference_media

log = get_logger(__name__)


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
        """Modalities of which items are taken."""
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
        decoded = self._decoders.decode(job, media)
        return self._process(job.modality, decoded, job.mm_hash, job.mm_processor_kwargs)

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
