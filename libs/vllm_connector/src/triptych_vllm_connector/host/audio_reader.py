"""Which containers vLLM's audio reader may open, that FFmpeg does not guess, and what damaged ones are."""

import functools
from collections.abc import Callable, Container
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


class AnyCode(Container[object]):
    """In the place of the set of libsndfile's error codes upon which vLLM asks PyAV.

    vLLM takes the others for faults of its own, and answers 500; many of them are malformed headers. The
    bytes are in memory, so nothing but they can be at fault.
    """

    def __contains__(self, code: object) -> bool:
        return True


def refusing(read: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's reader by PyAV, for which whatever decoders raise about a stranger's bytes is a ValueError."""

    @functools.wraps(read)
    def read_or_refuse(*args: Any, **options: Any) -> Any:
        try:
            return read(*args, **options)
        except (ImportError, ValueError):
            raise
        except Exception as error:
            raise ValueError("the bytes are not audio that can be decoded") from error

    return read_or_refuse


def read_audio_formats_only() -> None:
    """From now on this process's vLLM opens audio of `FORMATS` alone, each as what it begins like.

    What cannot be read is a ValueError, which vLLM answers by 400.

    Raises:
        TypeError: vLLM reads audio by something else.
    """
    from vllm.multimodal.media import audio

    if isinstance(audio.av, NamedFormats):
        return
    if not isinstance(audio.av, ModuleType) or not isinstance(audio._BAD_SF_CODES, set):
        raise TypeError("vLLM's reader of audio does not have PyAV and libsndfile where they were")
    audio.av = NamedFormats(audio.av)
    audio._BAD_SF_CODES = AnyCode()
    audio.load_audio_pyav = refusing(audio.load_audio_pyav)
