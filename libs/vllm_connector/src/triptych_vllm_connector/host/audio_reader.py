"""Audio, read by vLLM's own reader from decoders in a child process (`decoding`), which can be ended.

FFmpeg never guesses the container, which is named; codecs that it may decode are listed.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from fractions import Fraction
from functools import partial, wraps
from io import BytesIO
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import numpy as np

from triptych_common.domain.containers import AUDIO_CONTAINERS, HEAD_BYTES, container_of
from triptych_common.domain.media_bounds import refused_codec
from triptych_common.domain.transient import is_transient
from triptych_vllm_connector.decoding import messages
from triptych_vllm_connector.decoding.processes import (
    DecodeProcesses,
    DecoderError,
    MediaRefusedError,
    Session,
)
from triptych_vllm_connector.seams.replacing import SeamNotFoundError, is_wrapped, replace

# FFmpeg's own names. Left to itself it finds a play list or a session description behind an ID3 tag, say,
# and reads what that names: other files, or packets from the network, for which it waits for ever.
FORMATS = {"wav": "wav", "flac": "flac", "ogg": "ogg", "mp4": "mov", "webm": "matroska", "mp3": "mp3"}


def _demuxer_of(file: Any) -> str:
    """FFmpeg's name of the file's format, by its first bytes.

    Raises:
        ValueError: it begins like none that is read here, or it is a path.
    """
    if not isinstance(file, BytesIO):
        raise ValueError("audio is read from memory alone")  # noqa: TRY004 -- vLLM answers 400
    name = container_of(file.getbuffer()[:HEAD_BYTES].tobytes(), AUDIO_CONTAINERS)
    if name is None:
        raise ValueError("the bytes are not audio of a format that is decoded")
    return FORMATS[name]


class _Opened:
    """A file that a child process has open, while vLLM reads it."""

    def __init__(self, file: Any, processes: DecodeProcesses) -> None:
        """Raises MediaRefusedError: a codec of the file is not decoded here."""
        self.demuxer = _demuxer_of(file)
        with ExitStack() as opened:
            self.session: Session = opened.enter_context(processes.lend(file.getvalue(), "audio"))
            self._check_codecs()
            self._open()
            self._opened = opened.pop_all()

    def _check_codecs(self) -> None:
        try:
            streams = self.session.ask(messages.ListStreams(self.demuxer, "audio"), messages.Streams)
        except DecoderError:
            return  # FFmpeg cannot read the headers: it will not decode anything of it either
        codec = refused_codec(streams.codecs, self.session.bounds.audio_codecs)
        if codec is not None:
            raise MediaRefusedError(f"the codec {codec or 'of the audio'!r} is not decoded here")

    def _open(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)


class RemoteSound(_Opened):
    """libsndfile's `SoundFile`, as vLLM's reader uses it."""

    def __init__(self, file: Any, processes: DecodeProcesses, error: Callable[[int], Exception]) -> None:
        """`error` makes libsndfile's exception from its code, for which vLLM may try another reader."""
        self._error = error
        try:
            super().__init__(file, processes)
        except DecoderError as failed:
            raise error(failed.code) from failed

    def _open(self) -> None:
        sound = self.session.ask(messages.OpenSound(), messages.Sound)
        self.samplerate, self.frames, self.channels = sound.sample_rate, sound.num_frames, sound.num_channels

    def read(self, dtype: str, *, always_2d: bool) -> Any:
        """Read all samples as float32."""
        try:
            samples = self.session.ask(messages.ReadSound(), messages.Samples)
        except DecoderError as failed:
            raise self._error(failed.code) from failed
        shape = (samples.num_frames, samples.num_channels)[: 1 if samples.num_channels == 1 else 2]
        return np.array(_array(self.session, shape, np.float32, 0))


class RemoteContainer(_Opened):
    """PyAV's container, as vLLM's reader uses it."""

    def _open(self) -> None:
        audio = self.session.ask(messages.OpenAudio(self.demuxer), messages.AudioStream)
        base = None if audio.time_base is None else Fraction(*audio.time_base)
        stream = SimpleNamespace(rate=audio.rate, duration=audio.duration, time_base=base, thread_type="AUTO")
        self.streams = SimpleNamespace(audio=[stream] if audio.rate else [])
        self.duration = audio.container_duration

    def decode(self, stream: Any) -> Iterator["RemoteFrame"]:
        while chunks := self.session.ask(messages.DecodeAudio(), messages.Chunks).chunks:
            offset = 0
            for chunk in chunks:
                dtype = np.dtype(chunk.kind)
                offset = -(-offset // dtype.itemsize) * dtype.itemsize
                samples = _array(self.session, (chunk.num_rows, chunk.num_columns), dtype, offset)
                offset += samples.nbytes
                yield RemoteFrame(samples)


class RemoteFrame:
    """PyAV's audio frame, as vLLM's reader uses it."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def to_ndarray(self) -> Any:
        return np.array(self._samples)  # the next frames overwrite it


def _array(session: Session, shape: tuple[int, ...], dtype: Any, offset: int) -> Any:
    num_bytes = offset + int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
    return np.ndarray(shape, dtype, session.view(num_bytes), offset)


class RemoteModule:
    """The module `av` or `soundfile`, as vLLM's reader uses it, without what opens a file."""

    def __init__(self, module: ModuleType, **openers: Callable[[Any], Any]) -> None:
        self.module = module
        self._openers = openers

    def __getattr__(self, name: str) -> Any:
        return self._openers[name] if name in self._openers else getattr(self.module, name)


def refusing(read: Callable[..., Any], leaves: Callable[[Exception], bool]) -> Callable[..., Any]:
    """Wrap one of vLLM's readers so that decoders' errors about a caller's bytes are ValueErrors.

    vLLM takes much of that for a fault of its own, and answers 500. Errors for which `leaves` is true, and
    faults of the machine, are raised unchanged.
    """

    @wraps(read)
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


def read_audio_formats_only(processes: DecodeProcesses) -> None:
    """Make this process's vLLM open audio of `FORMATS` only, each as its first bytes say.

    It decodes in `processes`. torchcodec is not used: it decodes in the process that has torch. Unreadable
    audio is a ValueError, which vLLM answers by 400.

    Raises:
        SeamNotFoundError: vLLM reads audio by something else.
    """
    from vllm.multimodal.media import audio

    av, soundfile = (
        each.module if isinstance(each, RemoteModule) else each for each in (audio.av, audio.soundfile)
    )
    if not isinstance(av, ModuleType) or not isinstance(soundfile, ModuleType):
        raise SeamNotFoundError("vLLM's reader of audio does not have PyAV and soundfile where they were")

    def is_for_pyav(error: Exception) -> bool:
        return isinstance(error, soundfile.LibsndfileError) and error.code in audio._BAD_SF_CODES

    replace(audio, "AudioDecoder", None, used_by=(audio.load_audio_torchcodec,))
    remote_av = RemoteModule(av, open=partial(RemoteContainer, processes=processes))
    replace(audio, "av", remote_av, used_by=(audio.load_audio_pyav,), everywhere=False)
    sound_file = partial(RemoteSound, processes=processes, error=soundfile.LibsndfileError)
    remote_soundfile = RemoteModule(soundfile, SoundFile=sound_file)
    replace(audio, "soundfile", remote_soundfile, used_by=(audio.load_audio_soundfile,), everywhere=False)
    for name, leaves in (("load_audio_soundfile", is_for_pyav), ("load_audio_pyav", lambda _: False)):
        read = getattr(audio, name)
        if not is_wrapped(read):
            replace(audio, name, refusing(read, leaves), used_by=(audio.load_audio,))
