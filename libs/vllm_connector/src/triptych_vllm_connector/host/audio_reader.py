"""Which containers vLLM's audio reader may open, that FFmpeg does not guess, and what damaged ones are."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from triptych_common.domain.containers import AUDIO_CONTAINERS, HEAD_BYTES, container_of
from triptych_common.domain.transient import is_transient

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


def refusing(read: Callable[..., Any], leaves: Callable[[Exception], bool]) -> Callable[..., Any]:
    """One of vLLM's readers, for which what decoders raise about a stranger's bytes is a ValueError.

    vLLM takes much of that for a fault of its own, and answers 500. `leaves`: what is raised as it is, as are
    faults of the machine.
    """

    @functools.wraps(read)
    def read_or_refuse(*args: Any, **options: Any) -> Any:
        try:
            return read(*args, **options)
        except (ImportError, ValueError):
            raise
        except Exception as error:
            if is_transient(error) or leaves(error):
                raise
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
    if not isinstance(audio.av, ModuleType):
        raise TypeError("vLLM's reader of audio does not have PyAV where it was")

    def is_for_pyav(error: Exception) -> bool:
        """vLLM asks it for what libsndfile does not know."""
        is_code = isinstance(error, audio.soundfile.LibsndfileError)
        return is_code and error.code in audio._BAD_SF_CODES  # type: ignore[attr-defined]

    audio.av = NamedFormats(audio.av)
    audio.load_audio_soundfile = refusing(audio.load_audio_soundfile, is_for_pyav)
    audio.load_audio_pyav = refusing(audio.load_audio_pyav, lambda _: False)
