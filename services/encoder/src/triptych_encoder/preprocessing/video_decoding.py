"""Decodes videos to sampled frames with vLLM's loaders, bounded (connector `host.video_reader`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO

from triptych_common.domain.media_bounds import VideoBounds
from triptych_vllm_connector.decoding.processes import DecodeProcesses
from triptych_vllm_connector.host.video_reader import load_video


@dataclass(frozen=True, slots=True)
class VideoDecoder:
    """Decodes videos for one model."""

    bounds: VideoBounds
    processes: DecodeProcesses
    backend: str | None  # vLLM's name of the loader that chooses the model's frames; None: its default

    def decode(self, media: bytes, options: Mapping[str, Any]) -> Any:
        """Frames and their times, as vLLM's own server would make them. Blocks.

        Args:
            options: the request's `media_io_kwargs` for videos.

        Raises:
            MediaRefusedError: no video that is decoded here, or one beyond the bounds.
            Exception: whatever decoders raise about a stranger's bytes.
        """
        backend = {} if self.backend is None else {"video_backend": self.backend}
        reader = VideoMediaIO(ImageMediaIO(image_mode="RGB"), **{**backend, **options})
        return load_video(reader, media, self.bounds, self.processes)
