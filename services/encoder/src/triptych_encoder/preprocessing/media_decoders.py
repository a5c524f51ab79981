"""Decoder of each modality, and the cost of decoding."""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from PIL import Image
from vllm.multimodal.media.audio import load_audio
from vllm.multimodal.media.base import MediaWithBytes
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO

from triptych_common.domain.containers import AUDIO_CONTAINERS, container_of
from triptych_common.domain.jpeg_scans import MAX_JPEG_SCANS, has_too_many_scans
from triptych_common.domain.media_bounds import AudioBounds, VideoBounds
from triptych_common.domain.transient import is_transient
from triptych_common.protocol.messages import EncodeJob, ImageProperties, Modality
from triptych_encoder.encoding import LARGE_PIXELS, BadMediaError, PreprocessFailedError, PreprocessLimits
from triptych_vllm_connector.decoding.images import upright
from triptych_vllm_connector.decoding.processes import DecodeProcesses, MediaRefusedError
from triptych_vllm_connector.host.audio_reader import read_audio_formats_only
from triptych_vllm_connector.host.image_reader import decoded_apart
from triptych_vllm_connector.host.video_reader import load_video

_NAMES = {"MPO": "JPEG"}  # a JPEG of several pictures, as its reader calls it


@contextlib.contextmanager
def decoding(what: str) -> Iterator[None]:
    """Translate a decoder's errors, which may be of any type for a caller's bytes.

    Raises:
        BadMediaError: the bytes are to blame.
        PreprocessFailedError: this machine could not do it, now.
    """
    try:
        yield
    except BadMediaError:
        raise
    except MediaRefusedError as error:
        raise BadMediaError(str(error)) from error
    except Exception as error:
        if is_transient(error):
            raise PreprocessFailedError(f"the encoder had no resources to decode {what}") from error
        raise BadMediaError(f"the bytes are not {what} that can be decoded") from error


@dataclass(frozen=True, slots=True)
class ImageDecoder:
    """Decodes within the encoder's own `formats` and `max_pixels`, which a job cannot extend.

    The image is exactly the one that the gateway saw: the format and the size come with the job. Only that
    format's decoder is tried, and the size is compared before it runs, so that bytes which are another image
    for another decoder are refused.
    """

    formats: Collection[str]
    max_pixels: int
    processes: DecodeProcesses  # for images that a thread should not decode

    def check(self, image: ImageProperties | None) -> ImageProperties:
        """Properties of the job's image, if it may be decoded.

        Raises:
            BadMediaError: an image of that format, or of that size, is not decoded here.
        """
        if image is None:
            raise BadMediaError("the job does not say which image the gateway saw")
        if image.format not in self.formats:
            raise BadMediaError("images of this format are not decoded")
        if image.num_pixels > self.max_pixels:
            raise BadMediaError(f"the image has more than {self.max_pixels} pixels")
        return image

    def decode(
        self, media: bytes, image: ImageProperties, options: Mapping[str, Any]
    ) -> MediaWithBytes[Image.Image]:
        """Decode to the pixels that vLLM's own server would make, bit for bit. Blocks.

        Args:
            options: the request's `media_io_kwargs` for images.

        Raises:
            BadMediaError: the bytes are not that image, or cannot be decoded.
            PreprocessFailedError: this machine could not do it, now.
        """
        with decoding("an image"):
            return _decode(media, image, options, self.processes)


def _decode(
    media: bytes, properties: ImageProperties, options: Mapping[str, Any], processes: DecodeProcesses
) -> MediaWithBytes[Image.Image]:
    if properties.format == "JPEG" and has_too_many_scans(media):
        raise BadMediaError(f"the image has more than {MAX_JPEG_SCANS} scans")
    reader = ImageMediaIO(**{"image_mode": "RGB", **options})
    with Image.open(BytesIO(media), formats=(properties.format,)) as opened:
        found = (_NAMES.get(str(opened.format), opened.format), *opened.size)
        if found != (properties.format, properties.width, properties.height):
            raise BadMediaError("the image is not the one that the gateway saw")
        image = decoded_apart(opened, media, processes) or upright(opened)
        image.load()
    converted = reader._convert_image_mode(image)
    io_config = None
    if converted is not image:
        io_config = {"image_mode": reader.image_mode, "rgba_background_color": reader.rgba_background_color}
    return MediaWithBytes(converted, media, io_config)


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
            BytesIO(media), sr=None, max_duration_s=self.bounds.max_s, max_decode_bytes=self.bounds.max_bytes
        )


@dataclass(frozen=True, slots=True)
class VideoDecoder:
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
