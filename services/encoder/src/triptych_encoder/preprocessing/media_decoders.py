"""Decoder of each modality, and the cost of decoding."""

from typing import Any

from triptych_common.protocol.messages import EncodeJob, Modality
from triptych_encoder.encoding import LARGE_PIXELS, PreprocessLimits
from triptych_encoder.preprocessing.audio_decoding import AudioDecoder
from triptych_encoder.preprocessing.decoding import ImageDecoder, decoding
from triptych_encoder.preprocessing.video_decoding import VideoDecoder
from triptych_vllm_connector.decoding.processes import DecodeProcesses


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
