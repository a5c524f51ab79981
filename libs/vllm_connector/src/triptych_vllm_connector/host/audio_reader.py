"""Which containers vLLM's audio reader may open, and that FFmpeg does not guess what a file is."""

from types import ModuleType
from typing import Any

from triptych_common.domain.containers import AUDIO_CONTAINERS, HEAD_BYTES, container_of

# FFmpeg's own names. Left to itself it finds a play list or a session description behind an ID3 tag, say,
# and reads what that names: other files, or packets from the network, for which it waits for ever.
FORMATS = {"wav": "wav", "flac": "flac", "ogg": "ogg", "mp4": "mov", "webm": "matroska", "mp3": "mp3"}


class NamedFormats:
    """PyAV, as vLLM's reader uses it, with the format of each file named."""

    def __init__(self, av: ModuleType) -> None:
        self._av = av

    def __getattr__(self, name: str) -> Any:
        return getattr(self._av, name)

    def open(self, file: Any) -> Any:
        """A container, from a buffer.

        Raises:
            ValueError: it begins like none that is read here, or it is a path.
        """
        if not hasattr(file, "seek"):
            raise ValueError("audio is read from memory alone")
        file.seek(0)
        name = container_of(file.read(HEAD_BYTES), AUDIO_CONTAINERS)
        file.seek(0)
        if name is None:
            raise ValueError("the bytes are not audio of a format that is decoded")
        return self._av.open(file, format=FORMATS[name])


def read_audio_formats_only() -> None:
    """From now on this process's vLLM opens audio of `FORMATS` alone, each as what it begins like.

    Raises:
        TypeError: vLLM reads audio by something else.
    """
    from vllm.multimodal.media import audio

    if isinstance(audio.av, NamedFormats):
        return
    if not isinstance(audio.av, ModuleType):
        raise TypeError("vLLM's reader of audio does not have PyAV where it was")
    audio.av = NamedFormats(audio.av)
