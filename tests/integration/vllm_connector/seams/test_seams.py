"""Seams between versions of vLLM, on the imported one: `test_other_versions` runs this over others."""

import io
import warnings
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import xgrammar

from tests.support.vllm_connector.parking_engine import ParkingEngine
from triptych_common.domain.media_bounds import DecodingBounds, VideoBounds
from triptych_vllm_connector.versions import is_before_0_33

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from vllm.multimodal import image as vllm_image
    from vllm.multimodal.media import image as image_reader
    from vllm.multimodal.media.image import ImageMediaIO
    from vllm.multimodal.media.video import VideoMediaIO
    from vllm.multimodal.video_decoders.opencv import OpenCVVideoBackendMixin
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import FinishReason
    from vllm.v1.request import RequestStatus

    from triptych_vllm_connector import plugin
    from triptych_vllm_connector.decoding import messages
    from triptych_vllm_connector.decoding.processes import DecodeProcesses, Session
    from triptych_vllm_connector.grammars.checked import leave_conversion_out
    from triptych_vllm_connector.grammars.compiled import CompiledGrammarGoneError
    from triptych_vllm_connector.host import video_reader
    from triptych_vllm_connector.host.audio_reader import read_audio_formats_only
    from triptych_vllm_connector.host.image_reader import read_image_formats_only
    from triptych_vllm_connector.host.video_reader import VideoRefusedError, load_video
    from triptych_vllm_connector.records.replaying import ItemUrlParser, read_item_urls
    from triptych_vllm_connector.scheduler.encoder_cache_manager import (
        ForgettingEncoderCacheManager,
        PreallocatingEncoderCacheManager,
    )
    from triptych_vllm_connector.scheduler.parking_scheduler import ParkingAsyncScheduler, ParkingScheduler
    from triptych_vllm_connector.seams.current import seam

BOUNDS = VideoBounds(10.0, 64 * 48, 64 * 48 * 8, 64 * 48 * 8)
NUM_FRAMES = 8


class Pipe:
    """File that cannot be sought in: a muxer never returns to its header."""

    def __init__(self) -> None:
        self.content = bytearray()

    def write(self, piece: bytes) -> int:
        self.content += piece
        return len(piece)


def streamed(container: str) -> bytes:
    pipe = Pipe()
    write_video(pipe, container)
    return bytes(pipe.content)


def write_video(target: Any, container: str) -> None:
    generator = np.random.default_rng(0)
    with av.open(target, "w", format=container) as file:
        stream = file.add_stream("libvpx-vp9", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for _ in range(NUM_FRAMES):
            frame = av.VideoFrame.from_ndarray(generator.integers(0, 255, (48, 64, 3), np.uint8), "rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode())


def request_of(engine_request_id: str, *mm_hashes: str) -> Any:
    return SimpleNamespace(
        request_id=engine_request_id,
        mm_features=[SimpleNamespace(identifier=mm_hash) for mm_hash in mm_hashes],
        get_num_encoder_embeds=lambda input_id: 4,
    )


def test_all_parts_of_vllm_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replacement checks that vLLM uses it, and raises otherwise."""
    for module, name in ((vllm_image, "ALLOWED_IMAGE_FORMATS"), (image_reader, "open_image")):
        monkeypatch.setattr(module, name, getattr(module, name))  # later tests of this process read more
    processes = DecodeProcesses(DecodingBounds())
    for _ in range(2):
        plugin.register()
        read_item_urls()
        read_audio_formats_only(processes)
        leave_conversion_out()
    read_image_formats_only(("PNG",), processes)


def test_the_parser_of_content_parts_in_use_is_ours() -> None:
    read_item_urls()
    _, make_parser = seam.content_parser()
    assert make_parser.__globals__["AsyncMultiModalContentParser"] is ItemUrlParser


def test_a_compiled_grammar_that_is_gone_is_an_error_to_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 takes it for a fault of the request; 0.32 gives errors no text."""
    engine = ParkingEngine(monkeypatch, ParkingScheduler, 1)
    request = engine.add("r1")
    request.structured_output_request = SimpleNamespace(grammar=CompiledGrammarGoneError())
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    outputs, _ = engine.core.step_fn()
    (output,) = outputs[0].outputs
    assert output.finish_reason == FinishReason.ERROR
    error = getattr(output, "error", None)
    assert (error is None) is is_before_0_33()
    assert error is None or error.retryable


def test_schemas_of_tools_are_not_tried_in_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = pytest.importorskip("vllm.parser.response_template_grammar", reason="since vLLM 0.33")
    leave_conversion_out()
    monkeypatch.setattr(xgrammar, "Grammar", None)
    assert grammar._regex_compiles("(a|a)*b")
    assert grammar._json_compiles("{}")


def test_the_schedulers_are_vllms() -> None:
    assert issubclass(ParkingScheduler, Scheduler)
    assert issubclass(ParkingAsyncScheduler, Scheduler)


@pytest.mark.parametrize("container", ["webm", "matroska"])
def test_a_streamed_video_is_read_where_vllm_reads_it(container: str) -> None:
    media = streamed(container)
    reader = VideoMediaIO(ImageMediaIO(image_mode="RGB"), num_frames=4)
    processes = DecodeProcesses(DecodingBounds())
    if not seam.READS_METADATA_APART:
        with pytest.raises(VideoRefusedError, match="has no frames"):
            load_video(reader, media, BOUNDS, processes)
        return
    assert OpenCVVideoBackendMixin.demux_count_frames is video_reader._count_frames
    frames, metadata = VideoMediaIO(ImageMediaIO(image_mode="RGB"), num_frames=4).load_bytes(media).media
    got_frames, got_metadata = load_video(reader, media, BOUNDS, processes).media
    assert metadata["total_num_frames"] == NUM_FRAMES
    assert got_metadata == metadata
    assert np.array_equal(frames, got_frames)
    few = VideoBounds(1.0, 64 * 48, 64 * 48 * 8, 64 * 48 * 8)
    with pytest.raises(VideoRefusedError, match="longer than 1 s"):
        load_video(VideoMediaIO(ImageMediaIO(image_mode="RGB")), media, few, processes)


def test_a_video_is_decoded_from_a_capture_that_was_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since vLLM 0.33 its end is sought for the metadata, in a capture of their own."""
    asked: list[object] = []
    ask = Session.ask

    def noting(session: Session, request: Any, *rest: Any) -> Any:
        asked.append(request)
        return ask(session, request, *rest)

    monkeypatch.setattr(Session, "ask", noting)
    file = io.BytesIO()
    write_video(file, "mp4")
    reader = VideoMediaIO(ImageMediaIO(image_mode="RGB"), num_frames=4)
    load_video(reader, file.getvalue(), BOUNDS, DecodeProcesses(DecodingBounds()))
    kinds = [type(each) for each in asked]
    assert kinds.count(messages.OpenCapture) == (2 if seam.READS_METADATA_APART else 1)
    if seam.READS_METADATA_APART:
        last_open = len(kinds) - 1 - kinds[::-1].index(messages.OpenCapture)
        assert messages.SetProperty not in kinds[last_open:]


@pytest.mark.parametrize("manager_cls", [ForgettingEncoderCacheManager, PreallocatingEncoderCacheManager])
def test_requests_share_an_entry_until_the_last_one_frees_it(manager_cls: Any) -> None:
    manager = manager_cls(cache_size=100)
    first, second = request_of("r1", "a", "a"), request_of("r2", "a", "b")
    is_forgetting = manager_cls is ForgettingEncoderCacheManager
    manager.allocate(first, 0)
    for request, input_id in ((first, 1), (second, 0)):
        if is_forgetting:
            manager.allocate(request, input_id)
        else:
            assert manager.check_and_update_cache(request, input_id)
    manager.allocate(second, 1)
    for request in (first, second):
        for input_id in (0, 1):
            manager.free_encoder_input(request, input_id)
            manager.free_encoder_input(request, input_id)  # vLLM repeats the call
    assert not manager.cached
    assert not manager.request_cached_ids
    assert manager.num_free_slots == manager.num_freeable_slots == 100
    assert sorted(manager.get_freed_mm_hashes()) == ["a", "b"]
