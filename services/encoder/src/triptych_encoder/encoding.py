"""Interface of an engine that encodes, its errors and limits: jobs are imported and tested without vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from triptych_common.domain.errors import TriptychError
from triptych_common.domain.media_bounds import AudioBounds, DecodingBounds, VideoBounds
from triptych_common.domain.media_options import OptionRules
from triptych_common.protocol.item_record import ItemRecord
from triptych_common.protocol.messages import EncodeJob, FailureKind, Modality
from triptych_vllm_connector.step_orders import WriteOrder

LARGE_PIXELS = 2_000_000  # smaller images do not wait for larger ones


class BadMediaError(TriptychError):
    """The media cannot be decoded or processed, and a retry would fail the same way.

    Its text is shown to the caller, so it is never a library's: that is its `__cause__`, for the log.
    """


class PreprocessFailedError(TriptychError):
    """Preprocessing failed, and not because of the media. Its text is as in `BadMediaError`."""


class EncodeRefusedError(TriptychError):
    """The engine refuses this item and continues with others. Its text is as in `BadMediaError`."""


@dataclass
class JobFailure(Exception):
    """A job ends without a result; carries the failure that its requesters receive."""

    kind: FailureKind
    detail: str


class EngineFailedError(TriptychError):
    """vLLM's engine is dead: this process must be restarted."""


@dataclass(frozen=True)
class PreprocessLimits:
    """Limits of media and of preprocessing, whatever a job requests."""

    image_formats: tuple[str, ...]
    max_image_pixels: int
    processor_options: OptionRules  # options that jobs may carry
    media_options: Mapping[Modality, OptionRules]
    video: VideoBounds
    audio: AudioBounds
    timeout_s: float  # for one item
    num_pixels: int  # of all items that are worked on at once
    num_threads: int  # of small items, and of large ones, that are worked on at once
    stuck_after_s: float  # after its time is over; then the service ends
    decoding: DecodingBounds = field(default_factory=DecodingBounds)


@dataclass(frozen=True)
class PreparedItem:
    """One preprocessed item: vLLM's input, and the size of its result."""

    engine_input: Mapping[str, Any]
    num_embeds: int  # rows
    num_tokens: int  # of the encoder's prompt: placeholders, and what the model puts around them
    width: int  # columns
    record: ItemRecord  # for the language model
    pieces: tuple["PreparedItem", ...] = ()  # of the record's rows, in order, each to be encoded by itself
    decode_s: float = 0.0  # seconds that its media took to decode


class Encoder(Protocol):
    """Interface of `engine.encode_engine.EncodeEngine`; outputs are [num_embeds, width] of `dtype`."""

    dtype: str
    max_item_embeds: int

    @property
    def item_limits(self) -> Mapping[Modality, int]: ...

    @property
    def unserved_modalities(self) -> Mapping[Modality, str]:
        """Modalities of the model that this encoder does not serve, each with the reason."""
        ...

    @property
    def max_num_tokens(self) -> int: ...

    def num_pixels(self, job: EncodeJob) -> int:
        """Cost of the item while in hand, in pixels: of its image, or the most that its options allow."""
        ...

    async def preprocess(self, job: EncodeJob, media: bytes) -> PreparedItem:
        """Preprocess the job's media; raises BadMediaError or PreprocessFailedError."""
        ...

    async def encode(self, prepared: PreparedItem, order: WriteOrder) -> None:
        """Encode; raises EncodeRefusedError or EngineFailedError. No worker writes after a refusal.

        On return a GPU may still write the item: its seal comes later.
        """
        ...

    async def is_writing(self) -> bool:
        """True while a GPU writes items for which `encode` has returned; raises EngineFailedError."""
        ...

    async def check_health(self) -> None:
        """Raise EngineFailedError if the engine is dead, also while idle, or preprocessing is stuck."""
        ...
