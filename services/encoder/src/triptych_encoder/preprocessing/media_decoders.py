"""Decoder of each modality, and the cost of decoding."""

from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from vllm.multimodal.media.audio import load_audio
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO

from triptych_common.domain.containers import AUDIO_CONTAINERS, container_of
from triptych_common.domain.media_bounds import AudioBounds, VideoBounds
from triptych_common.protocol.messages import EncodeJob, Modality
from triptych_encoder.encoding import LARGE_PIXELS, BadMediaError, PreprocessLimits
from triptych_encoder.preprocessing.decoding import ImageDecoder, decoding
from triptych_vllm_connector.decoding.processes import DecodeProcesses
from triptych_vllm_connector.host.audio_reader import read_audio_formats_only
from triptych_vllm_connector.host.video_reader import load_video


@dataclass(frozen=True, slots=True)
class AudioDecoder:
    bounds: AudioBounds
    processes: DecodeProcesses

    def __post_init__(self) -> None:
        read_audio_formats_only(self.processes)

    def decode(self, media: bytes) -> Any:
        """Samples as float32 [samples] and their rate, as vLLM's own server would make them. Blocks.

        Raises:
            BadMediaError: no audio that is decoded here.
            MediaRefusedError: a codec that is not decoded, or audio that takes too much time or memory.
            Exception: whatever decoders raise about a stranger's bytes; ValueError when it is too long.
        """
        if container_of(media, AUDIO_CONTAINERS) is None:
            raise BadMediaError("the bytes are not audio of a format that is decoded")
        return load_audio(
            BytesIO(media),
            sr=None,
            max_duration_s=self.bounds.max_s,
            max_decode_bytes=self.bounds.max_bytes,
        )


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


class MediaDecoders:
    """Decodes a job's bytes for vLLM's renderer."""

    def __init__(self, limits: PreprocessLimits, video_backend: str | None) -> None:
        """`video_backend` is described at `VideoDecoder.backend`."""
        processes = DecodeProcesses(limits.decoding)
        self._image = ImageDecoder(limits.image_formats, limits.max_image_pixels, processes)
        self._video = VideoDecoder(limits.video, processes, video_backend)
        self._audio = AudioDecoder(limits.audio, processes)
        # Half of what may be worked on at once: how large a video is shows when it is opened. Audio counts
        # as a small image.
        self._video_cost = max(LARGE_PIXELS + 1, limits.num_pixels // 2)

    def check(self, job: EncodeJob) -> None:
        """Check the announced format and size of an image before its bytes are read.

        Raises:
            BadMediaError: this encoder does not decode such an image.
        """
        if job.modality is Modality.IMAGE:
            self._image.check(job.image)

    def num_pixels(self, job: EncodeJob) -> int:
        """Cost of the job's media in pixels; 0 if there is none, or an image is about to be refused."""
        if job.modality is Modality.IMAGE:
            return job.image.num_pixels if job.image is not None else 0
        return self._video_cost if job.modality is Modality.VIDEO else LARGE_PIXELS

    def decode(self, job: EncodeJob, media: bytes) -> Any:
        """Decode the media for vLLM's renderer. Blocks.

        Raises:
            BadMediaError: the bytes are not what the job says, or cannot be decoded.
            PreprocessFailedError: this machine could not do it, now.
        """
        options = job.media_io_kwargs
        if job.modality is Modality.VIDEO:
            with decoding("a video"):
                return self._video.decode(media, options)
        if job.modality is Modality.AUDIO:
            with decoding("audio"):
                return self._audio.decode(media)
        return self._image.decode(media, self._image.check(job.image), options)
