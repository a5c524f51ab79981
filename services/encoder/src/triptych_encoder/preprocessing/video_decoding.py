"""From a video's bytes to its sampled frames: vLLM's own loaders, stopped before they cost too much.

Which frames are taken depends on the model, and vLLM knows it. It reads the video's header, chooses frames,
and only then decodes: between the two the frames are counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cv2
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO

from triptych_common.domain.containers import VIDEO_CONTAINERS, container_of
from triptych_encoder.encoding import BadMediaError, VideoBounds

MAX_FRAMES_PER_S = 240  # of the file; more is no camera's


class _BoundedLoader:
    """Mixin in front of one of vLLM's loaders."""

    bounds: VideoBounds

    @classmethod
    def compute_frames_index_to_sample(cls, source: Any, target: Any, **kwargs: Any) -> list[int]:
        if source.total_frames_num < 1:
            raise BadMediaError("the video has no frames")
        is_long = source.duration > cls.bounds.max_s
        if is_long or source.total_frames_num > cls.bounds.max_s * MAX_FRAMES_PER_S:
            raise BadMediaError(f"the video is longer than {cls.bounds.max_s:g} s")
        indices: list[int] = super().compute_frames_index_to_sample(  # type: ignore[misc]
            source=source, target=target, **kwargs
        )
        return indices

    @classmethod
    def read_frames(cls, cap: Any, frame_indices: list[int], *args: Any, **kwargs: Any) -> Any:
        num_pixels = int(cap.get(cv2.CAP_PROP_FRAME_WIDTH)) * int(cap.get(cv2.CAP_PROP_FRAME_HEIGHT))
        if not 0 < num_pixels <= cls.bounds.max_frame_pixels:
            raise BadMediaError(f"the video has no frames of 1 to {cls.bounds.max_frame_pixels} pixels")
        if num_pixels * len(frame_indices) > cls.bounds.max_pixels:
            raise BadMediaError(f"the video's frames have more than {cls.bounds.max_pixels} pixels together")
        return super().read_frames(cap, frame_indices, *args, **kwargs)  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class VideoDecoder:
    """For one model."""

    bounds: VideoBounds
    backend: str | None  # vLLM's name of the loader that chooses the model's frames; None: its default

    def decode(self, media: bytes, options: Mapping[str, Any]) -> Any:
        """Frames and their times, as vLLM's own server would make them. Blocks.

        Args:
            options: the request's `media_io_kwargs` for videos.

        Raises:
            BadMediaError: no video that is decoded here, or one beyond the bounds.
            Exception: whatever decoders raise about a stranger's bytes.
        """
        if container_of(media, VIDEO_CONTAINERS) is None:
            raise BadMediaError("the bytes are not a video of a format that is decoded")
        backend = {} if self.backend is None else {"video_backend": self.backend}
        reader = VideoMediaIO(ImageMediaIO(image_mode="RGB"), **{**backend, **options})
        loader = type(reader.video_loader)
        reader.video_loader = type(loader.__name__, (_BoundedLoader, loader), {"bounds": self.bounds})()
        return reader.load_bytes(media)
