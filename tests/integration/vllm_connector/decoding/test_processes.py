"""Decoders in child processes: what is endless, too large or crashes ends its child, and nothing else."""

import io
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import psutil
import pytest
from PIL import Image
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO

from tests.support.families.media import VideoShape, encoded
from tests.support.hostile.images import saved
from tests.support.waiting import wait_until
from triptych_common.domain.media_bounds import DecodingBounds, VideoBounds
from triptych_vllm_connector.decoding import messages
from triptych_vllm_connector.decoding.processes import (
    DecodeProcesses,
    DecoderError,
    MediaRefusedError,
    _Process,
)
from triptych_vllm_connector.host.image_reader import decoded_apart
from triptych_vllm_connector.host.video_reader import load_video

SHAPE = VideoShape(64, 48, num_frames=8, frames_per_s=4)
WIDE = VideoBounds(1000.0, 10**8, 10**10, 10**11)
LONG = DecodingBounds(video_codecs=("h264", "mpeg4", "jpeg2000"), timeout_s=300.0)
ENDLESS_FRAMES = 100  # more than ten seconds of a core


@cache
def jpeg_2000(num_frames: int, size: int = 512) -> bytes:
    """An AVI whose frames each take a decoder a tenth of a second: one picture of noise, again and again."""
    noise = np.random.default_rng(1).integers(0, 255, (size, size, 3), np.uint8)
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as container:
        stream = container.add_stream("jpeg2000", rate=10)
        stream.width, stream.height, stream.pix_fmt = size, size, "rgb24"
        frame = av.VideoFrame.from_ndarray(noise, "rgb24")
        data = b"".join(bytes(each) for each in (*stream.encode(frame), *stream.encode()))
        for number in range(num_frames):
            packet = av.Packet(data)
            packet.stream, packet.time_base = stream, Fraction(1, 10)
            packet.pts = packet.dts = number
            packet.is_keyframe = True
            container.mux(packet)
    return file.getvalue()


def frames_of(processes: DecodeProcesses, media: bytes) -> Any:
    reader = VideoMediaIO(ImageMediaIO(image_mode="RGB"), num_frames=4)
    return load_video(reader, media, WIDE, processes).media[0]


def decode_while(processes: DecodeProcesses, number: signal.Signals) -> None:
    """Ask a decoder for a frame that gets a signal meanwhile."""
    with processes.lend(encoded(SHAPE, 1), "video") as session:
        os.kill(session._process.pid, number)
        session.ask(messages.OpenCapture(1), messages.Acknowledged)


def test_an_endless_video_ends_at_its_cpu_limit_while_others_are_decoded() -> None:
    processes = DecodeProcesses(replace(LONG, cpu_s=2))
    with ThreadPoolExecutor(1) as pool:
        endless = pool.submit(frames_of, processes, jpeg_2000(ENDLESS_FRAMES))
        num_decoded = 0
        while not endless.done():
            assert len(frames_of(processes, encoded(SHAPE, 1))) == 4
            num_decoded += 1
    with pytest.raises(MediaRefusedError, match="the video took more than 2 s of CPU time"):
        endless.result()
    assert num_decoded > 0
    processes.close()


def test_a_decoder_that_stands_still_is_ended_and_the_next_item_is_decoded() -> None:
    processes = DecodeProcesses(replace(LONG, timeout_s=0.5, num_processes=1))
    with pytest.raises(MediaRefusedError, match="the video takes too long"):
        decode_while(processes, signal.SIGSTOP)
    processes.bounds = replace(processes.bounds, timeout_s=60.0)
    assert len(frames_of(processes, encoded(SHAPE, 1))) == 4
    processes.close()


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_a_crash_is_the_items_fault_alone(number: signal.Signals) -> None:
    processes = DecodeProcesses(replace(LONG, num_processes=1))
    with pytest.raises(MediaRefusedError, match=rf"crashed \({number.name}\)"):
        decode_while(processes, number)
    assert len(frames_of(processes, encoded(SHAPE, 1))) == 4
    processes.close()


def test_a_process_that_the_machine_ends_is_no_fault_of_the_item() -> None:
    processes = DecodeProcesses(LONG)
    with pytest.raises(MemoryError):
        decode_while(processes, signal.SIGKILL)
    processes.close()


def test_a_reply_that_is_none_ends_the_process_and_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = DecodeProcesses(replace(LONG, num_processes=1))
    with monkeypatch.context() as patched:
        patched.setattr(_Process, "try_receive", lambda self, timeout_s: b"\xc1")
        with pytest.raises(DecoderError, match="no reply"):
            frames_of(processes, encoded(SHAPE, 1))
    assert len(frames_of(processes, encoded(SHAPE, 1))) == 4
    processes.close()


def test_an_idle_process_that_was_ended_is_replaced() -> None:
    processes = DecodeProcesses(LONG)
    assert len(frames_of(processes, encoded(SHAPE, 1))) == 4
    (idle,) = processes._idle
    os.kill(idle.pid, signal.SIGKILL)
    idle.wait_ended()
    assert len(frames_of(processes, encoded(SHAPE, 1))) == 4
    processes.close()


@pytest.mark.parametrize(
    "content",
    [
        b"P6 4000 4000 254\n" + bytes(3 * 4000 * 4000),
        b"P3 4000 4000 255\n" + b"1 " * (3 * 4000 * 4000),
        b"qoif" + (4000).to_bytes(4) * 2 + b"\3\0" + b"\x55" * 4000 * 4000,
    ],
    ids=["ppm", "plain ppm", "qoi"],
)
def test_what_pillow_decodes_in_python_ends_with_its_time(content: bytes) -> None:
    processes = DecodeProcesses(replace(LONG, cpu_s=1, num_processes=1))
    with pytest.raises(MediaRefusedError), Image.open(io.BytesIO(content)) as opened:
        decoded_apart(opened, content, processes)
    assert len(frames_of(processes, encoded(SHAPE, 1))) == 4
    processes.close()


def test_memory_is_bounded_and_the_process_goes_on() -> None:
    processes = DecodeProcesses(replace(LONG, num_bytes=64 << 20, num_processes=1))
    content = saved(Image.new("RGB", (6000, 6000)), "TIFF", compression="tiff_lzw")
    with pytest.raises(MediaRefusedError, match="the image needs more than 64 MiB"):  # noqa: SIM117
        with Image.open(io.BytesIO(content)) as opened:
            decoded_apart(opened, content, processes)
    with pytest.raises(MediaRefusedError, match="the video"):
        frames_of(processes, jpeg_2000(1, 2048))
    assert len(frames_of(processes, encoded(SHAPE, 1))) == 4
    processes.close()


def test_nothing_is_left_behind() -> None:
    def left() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), len(psutil.Process().children())

    before = left()
    processes = DecodeProcesses(LONG)
    for media in (encoded(SHAPE, 1), encoded(SHAPE, 1)[:700], b"", jpeg_2000(1)):
        with suppress(ValueError):
            frames_of(processes, media)
    (process,) = processes._idle
    opened = [each.readlink() for each in Path(f"/proc/{process.pid}/fd").iterdir()]
    assert not [each for each in opened if "memfd" in each.name]
    assert "/dev/shm" not in Path(f"/proc/{process.pid}/maps").read_text()  # others use the folder meanwhile
    processes.close()
    assert left() == before


def test_no_secret_and_no_heavy_library_is_in_a_decoding_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_REDIS_URL", "redis://:secret@127.0.0.1")
    processes = DecodeProcesses(LONG)
    with processes.lend(b"", "video") as session:
        process = Path(f"/proc/{session._process.pid}")
        assert b"TRIPTYCH" not in (process / "environ").read_bytes()
        assert "libtorch" not in (process / "maps").read_text()
    processes.close()


HOST = """
import sys
from triptych_common.domain.media_bounds import DecodingBounds
from triptych_vllm_connector.decoding import messages
from triptych_vllm_connector.decoding.processes import DecodeProcesses
processes = DecodeProcesses(DecodingBounds(timeout_s=300.0, cpu_s=200))
with processes.lend(sys.stdin.buffer.read(), "video") as session:
    session.ask(messages.OpenCapture(1), messages.Acknowledged)
    session._process.send(messages.Grab(4096))
    print(session._process.pid, flush=True)
    session._process.try_receive(300.0)
"""


def test_a_decoder_in_the_middle_of_its_work_ends_with_its_host() -> None:
    host = subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with host:
        assert host.stdin is not None
        assert host.stdout is not None
        host.stdin.write(jpeg_2000(ENDLESS_FRAMES))
        host.stdin.close()
        child = psutil.Process(int(host.stdout.readline()))
        wait_until(lambda: child.cpu_times().user > 0.5, 60.0, "the decoder does not work")
        host.kill()
    wait_until(lambda: not child.is_running() or child.status() == "zombie", 60.0, "the decoder lives on")


def test_items_wait_for_a_free_process() -> None:
    processes = DecodeProcesses(replace(LONG, num_processes=1))
    asked, done = threading.Event(), threading.Event()

    def second() -> int:
        asked.set()
        num_frames = len(frames_of(processes, encoded(SHAPE, 1)))
        done.set()
        return num_frames

    with ThreadPoolExecutor(1) as pool:
        with processes.lend(b"", "video"):
            waiting = pool.submit(second)
            assert asked.wait(60.0)
            assert not done.is_set()
        assert waiting.result() == 4
    processes.close()


def mpeg_4(num_frames: int) -> bytes:
    """An AVI of noise; its index is at its end, and its frames can be read without."""
    rng = np.random.default_rng(3)
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for _ in range(num_frames):
            pixels = rng.integers(0, 255, (48, 64, 3), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize(
    "backend", ["opencv", "opencv_dynamic", "qwen3_vl", "glm5next", "molmo2", "openpangu", "nemotron_vl"]
)
@pytest.mark.parametrize("options", [{}, {"frame_recovery": True}], ids=str)
def test_each_of_vllms_loaders_takes_the_same_frames(backend: str, options: dict[str, Any]) -> None:
    """Also of files that were cut off, of which frames cannot be read."""
    processes = DecodeProcesses(DecodingBounds())
    media = mpeg_4(40)
    for each in (encoded(SHAPE, 1), media, media[: len(media) * 3 // 5]):
        expected = reader_of(backend, options).load_bytes(each).media
        frames, metadata = load_video(reader_of(backend, options), each, WIDE, processes).media
        assert len(frames) > 0
        assert np.array_equal(frames, expected[0])
        assert metadata == expected[1]
    processes.close()


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("mp4", "libx264"),
        ("mp4", "libx265"),
        ("mp4", "mpeg4"),
        ("mov", "mjpeg"),
        ("mov", "prores_ks"),
        ("webm", "libvpx"),
        ("webm", "libvpx-vp9"),
        ("matroska", "mpeg2video"),
        ("avi", "mjpeg"),
    ],
)
def test_common_codecs_are_decoded_as_before(container: str, codec: str) -> None:
    pixels = np.random.default_rng(5).integers(0, 255, (48, 64, 3), np.uint8)
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=8)
        formats = av.Codec(codec, "w").video_formats
        assert formats
        stream.width, stream.height, stream.pix_fmt = 64, 48, formats[0].name
        for number in range(6):
            frame = av.VideoFrame.from_ndarray(np.roll(pixels, number, 0), "rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    processes = DecodeProcesses(DecodingBounds())
    expected = reader_of("opencv", {}).load_bytes(file.getvalue()).media
    frames, metadata = load_video(reader_of("opencv", {}), file.getvalue(), WIDE, processes).media
    assert len(frames) == 6
    assert np.array_equal(frames, expected[0])
    assert metadata == expected[1]
    processes.close()


def reader_of(backend: str, options: dict[str, Any]) -> VideoMediaIO:
    return VideoMediaIO(ImageMediaIO(image_mode="RGB"), video_backend=backend, **options)


def test_a_codec_that_is_not_listed_reaches_no_decoder() -> None:
    processes = DecodeProcesses(DecodingBounds(num_processes=1))
    with pytest.raises(MediaRefusedError, match="codec 'jpeg2000' is not decoded"):
        frames_of(processes, jpeg_2000(1))
    assert len(frames_of(processes, encoded(SHAPE, 1))) == 4
    processes.close()
