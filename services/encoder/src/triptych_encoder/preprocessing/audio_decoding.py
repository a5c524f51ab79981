"""Decodes audio files with vLLM's own reader, bounded in seconds and bytes."""

from dataclasses import dataclass
from io import BytesIO
from typing import Any

from vllm.multimodal.media.audio import load_audio

from triptych_common.domain.containers import AUDIO_CONTAINERS, container_of
from triptych_common.domain.media_bounds import AudioBounds
from triptych_encoder.encoding import BadMediaError
from triptych_vllm_connector.decoding.processes import DecodeProcesses
from triptych_vllm_connector.host.audio_reader import read_audio_formats_only


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
