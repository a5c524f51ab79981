"""vLLM's own audio reader: FFmpeg is told what a file is."""

import functools
import io
import wave

import av
import numpy as np
import pytest
import soundfile

pytest.importorskip("vllm")
from vllm.multimodal.media import audio as vllm_audio

from triptych_common.domain.containers import AUDIO_CONTAINERS
from triptych_common.domain.media_bounds import DecodingBounds
from triptych_vllm_connector.decoding.processes import DecodeProcesses
from triptych_vllm_connector.host.audio_reader import FORMATS, RemoteContainer, read_audio_formats_only

# An ID3 tag without a frame, and behind it a session whose packets would be waited for on a socket.
SESSION = (
    b"ID3\x03\0\0\0\0\0\0"
    b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 5004 RTP/AVP 0\n"
)

PROCESSES = DecodeProcesses(DecodingBounds())


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_audio, "av", av)
    monkeypatch.setattr(vllm_audio, "soundfile", soundfile)
    for name in ("load_audio_soundfile", "load_audio_pyav"):
        reader = getattr(vllm_audio, name)  # an encoder's test may have changed it
        monkeypatch.setattr(vllm_audio, name, getattr(reader, "__wrapped__", reader))


def encoded(container: str, codec: str) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=48_000)
        samples = np.zeros((1, 4800), np.float32 if codec != "flac" else np.int16)
        frame = av.AudioFrame.from_ndarray(samples, "fltp" if codec != "flac" else "s16", "mono")
        frame.sample_rate = 48_000
        for packet in [*stream.encode(frame), *stream.encode()]:
            output.mux(packet)
    return file.getvalue()


def wav() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as output:
        output.setparams((1, 2, 16_000, 0, "NONE", ""))
        output.writeframes(b"\0\0" * 1600)
    return file.getvalue()


def test_each_container_has_ffmpegs_name() -> None:
    assert FORMATS.keys() == AUDIO_CONTAINERS.keys()


SOUNDS = {
    "wav": wav(),
    "flac": encoded("flac", "flac"),
    "ogg": encoded("ogg", "libopus"),
    "mp4": encoded("mp4", "aac"),
    "webm": encoded("webm", "libopus"),
    "mp3": encoded("mp3", "libmp3lame"),
}


@pytest.mark.parametrize("content", SOUNDS.values(), ids=SOUNDS)
def test_sounds_are_read_as_before(content: bytes) -> None:
    before, rate = vllm_audio.load_audio_pyav(io.BytesIO(content), sr=None)
    read_audio_formats_only(PROCESSES)
    read_audio_formats_only(PROCESSES)
    after, rate_after = vllm_audio.load_audio_pyav(io.BytesIO(content), sr=None)
    assert rate == rate_after
    assert np.array_equal(before, after)
    assert len(after) > 0


@pytest.mark.parametrize("in_front", [bytes(1), bytes(4096), SOUNDS["mp3"][1000:1300]])
def test_mp3_behind_other_bytes_is_what_vllm_makes_of_it(in_front: bytes) -> None:
    frames = SOUNDS["mp3"][SOUNDS["mp3"].index(b"\xff\xfb") :]
    before, rate = vllm_audio.load_audio(io.BytesIO(in_front + frames), sr=None)
    read_audio_formats_only(PROCESSES)
    after, rate_after = vllm_audio.load_audio(io.BytesIO(in_front + frames), sr=None)
    assert rate == rate_after
    assert len(after) > 0
    assert np.array_equal(before, after)


@pytest.mark.parametrize("content", SOUNDS.values(), ids=SOUNDS)
def test_a_damaged_sound_is_bad_input_and_no_fault(content: bytes) -> None:
    """vLLM answers 400 for a ValueError, and 500 for all else."""
    read_audio_formats_only(PROCESSES)
    num_refused = 0
    for length in (*range(0, 200, 8), *range(200, len(content), 197)):
        try:
            vllm_audio.load_audio(io.BytesIO(content[:length]))
        except ValueError:
            num_refused += 1
    assert num_refused > 1


@pytest.mark.parametrize(
    "content", [SESSION, SESSION[10:], b"ffconcat version 1.0\nfile a.wav\n", b"#EXTM3U\na.wav\n"]
)
def test_a_file_that_names_others_is_no_sound(content: bytes) -> None:
    read_audio_formats_only(PROCESSES)
    with pytest.raises(ValueError, match=r"nvalid|not audio"):
        vllm_audio.load_audio_pyav(io.BytesIO(content))


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
def test_a_fault_of_the_machine_is_none_of_the_sound(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    @functools.wraps(vllm_audio.load_audio_soundfile)  # to be taken for vLLM's
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(vllm_audio, "load_audio_soundfile", fail)
    read_audio_formats_only(PROCESSES)
    with pytest.raises(type(error)):
        vllm_audio.load_audio(io.BytesIO(wav()))


def test_paths_are_not_read() -> None:
    with pytest.raises(ValueError, match="from memory"):
        RemoteContainer("/etc/hostname", PROCESSES)
