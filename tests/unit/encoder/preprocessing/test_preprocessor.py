"""Preprocessing as a job sees it, around a renderer that misbehaves. No engine runs."""

import errno
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from tests.support.hostile.images import saved
from tests.support.item_records import grid_of_record, item_record
from tests.support.message_samples import encode_job
from triptych_common.domain.media_bounds import AudioBounds, VideoBounds
from triptych_common.domain.media_options import OptionBounds
from triptych_common.protocol.messages import ImageProperties, Modality
from triptych_encoder.encoding import (
    BadMediaError,
    EngineFailedError,
    PreparedItem,
    PreprocessFailedError,
    PreprocessLimits,
)
from triptych_encoder.preprocessing import preprocessor as preprocessing
from triptych_encoder.preprocessing.bounded_threads import BoundedThreads
from triptych_encoder.preprocessing.preprocessor import IMAGE_SIZES, Preprocessor, Rendered, reference_media

PICTURE = saved(Image.new("RGB", (56, 28), (9, 9, 9)), "PNG")
LIMITS = PreprocessLimits(
    image_formats=("PNG",),
    max_image_pixels=1_000_000,
    processor_options={"max_pixels": OptionBounds(min=4, max=4096)},
    media_options={},
    video=VideoBounds(60.0, 1_000_000, 1_000_000, 1_000_000),
    audio=AudioBounds(60.0, 1_000_000),
    timeout_s=30.0,
    num_pixels=1_000_000,
    num_threads=2,
    stuck_after_s=30.0,
)
JOB = encode_job(media_num_bytes=len(PICTURE), image=ImageProperties(format="PNG", width=56, height=28))
PATCH = 14


class Renderer:
    """Cuts an image into patches, four of which are one row; `patch_width` as set, or raises `error`."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.patch_width = 12
        self.num_calls = 0

    def __call__(self, modality: Modality, pixels: Any, mm_hash: str, options: Mapping[str, Any]) -> Rendered:
        self.num_calls += 1
        if self.error is not None:
            raise self.error
        width, height = pixels.media.size
        grid = (1, 2 * max(height // (2 * PATCH), 1), 2 * max(width // (2 * PATCH), 1))
        item = {
            "pixel_values": SimpleNamespace(data=torch.zeros(grid[1] * grid[2], self.patch_width)),
            "image_grid_thw": SimpleNamespace(data=torch.tensor(grid)),
        }
        rows = grid[1] * grid[2] // 4
        return Rendered(PreparedItem({"options": options}, rows, rows + 2, 8, item_record(rows, grid)), item)


@pytest.fixture
def renderer() -> Renderer:
    return Renderer()


@pytest.fixture
async def preprocessor(renderer: Renderer) -> Preprocessor:
    made = Preprocessor(renderer, LIMITS)
    await made.learn_item_schemas([Modality.IMAGE])
    renderer.num_calls = 0
    return made


async def test_an_item_of_the_learned_form(preprocessor: Preprocessor) -> None:
    prepared = await preprocessor.prepare(JOB, PICTURE)
    assert (prepared.num_embeds, grid_of_record(prepared.record)) == (2, [1, 2, 4])
    assert prepared.decode_s > 0


async def test_an_item_of_another_form_does_not_reach_the_engine(
    preprocessor: Preprocessor, renderer: Renderer
) -> None:
    renderer.patch_width = 3
    with pytest.raises(BadMediaError, match="encoder"):
        await preprocessor.prepare(JOB, PICTURE)


@pytest.mark.parametrize(
    "changes",
    [
        {"mm_processor_kwargs": {"patch_size": 7}},
        {"mm_processor_kwargs": {"max_pixels": 40_000_000}},
        {"media_io_kwargs": {"image_mode": "CMYK"}},
        {"image": None},
        {"image": ImageProperties(format="BMP", width=56, height=28)},
        {"image": ImageProperties(format="PNG", width=2000, height=2000)},
        {"image": ImageProperties(format="PNG", width=28, height=56)},
        {"modality": Modality.VIDEO},
    ],
    ids=str,
)
async def test_a_job_that_asks_for_more_than_this_encoder_gives(
    preprocessor: Preprocessor, renderer: Renderer, changes: dict[str, Any]
) -> None:
    with pytest.raises(BadMediaError):
        await preprocessor.prepare(JOB.model_copy(update=changes), PICTURE)
    assert renderer.num_calls == 0


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ValueError("secret /path"), BadMediaError),
        (KeyError("secret"), BadMediaError),
        (RuntimeError("secret shape"), BadMediaError),
        (MemoryError("secret"), PreprocessFailedError),
        (OSError(errno.EMFILE, "secret"), PreprocessFailedError),
        (RuntimeError("secret DefaultCPUAllocator: can't allocate memory"), PreprocessFailedError),
    ],
    ids=repr,
)
async def test_what_the_processor_raises_is_reported_without_its_text(
    preprocessor: Preprocessor, renderer: Renderer, error: Exception, raised: type[Exception]
) -> None:
    renderer.error = error
    with pytest.raises(raised) as caught:
        await preprocessor.prepare(JOB, PICTURE)
    assert "secret" not in str(caught.value)
    assert type(error).__name__ not in str(caught.value)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("bounds", "options", "cost"),
    [
        ({"min_pixels": OptionBounds(min=4, max=4096)}, {}, 56 * 28),
        ({"min_pixels": OptionBounds(min=4, max=4096)}, {"min_pixels": 8}, 4096),
        ({"min_pixels": OptionBounds(min=4, max=4096.5)}, {"min_pixels": 8}, 4097),
        ({"min_pixels": OptionBounds(min=4, max=100)}, {"min_pixels": 8}, 56 * 28),
        ({"max_pixels": OptionBounds(values=(None, 8, 5000))}, {"max_pixels": 8}, 5000),
        ({"patch_size": OptionBounds(min=4, max=4096)}, {"patch_size": 8}, 56 * 28),
    ],
    ids=str,
)
async def test_an_image_is_charged_what_its_options_may_make_of_it(
    renderer: Renderer,
    bounds: dict[str, OptionBounds],
    options: dict[str, Any],
    cost: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Preprocessor(renderer, replace(LIMITS, processor_options=bounds))
    await made.learn_item_schemas([Modality.IMAGE])
    charged: list[int] = []
    run = made._threads.run

    async def charge(cost: int, work: Any) -> Any:
        charged.append(cost)
        return await run(cost, work)

    monkeypatch.setattr(made._threads, "run", charge)
    job = JOB.model_copy(update={"mm_processor_kwargs": options})
    await made.prepare(job, PICTURE)
    assert (charged, made.num_pixels(job)) == ([cost], cost)


@pytest.mark.parametrize("update", [{"image": None}, {"mm_processor_kwargs": {"min_pixels": 8}}], ids=str)
async def test_what_is_about_to_be_refused_has_a_size_too(
    preprocessor: Preprocessor, update: dict[str, Any]
) -> None:
    job = JOB.model_copy(update=update)
    assert preprocessor.num_pixels(job) == (56 * 28 if job.image else 0)
    with pytest.raises(BadMediaError):
        await preprocessor.prepare(job, PICTURE)


async def test_a_model_that_takes_no_image_of_ours_is_not_served(renderer: Renderer) -> None:
    renderer.error = ValueError("no")
    with pytest.raises(EngineFailedError):
        await Preprocessor(renderer, LIMITS).learn_item_schemas([Modality.IMAGE])
    assert renderer.num_calls == len(IMAGE_SIZES)


async def test_a_modality_that_is_not_served_has_its_own_reason(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    media = {Modality.IMAGE: reference_media(Modality.IMAGE), Modality.VIDEO: {"frames": object()}}
    monkeypatch.setattr(preprocessing, "reference_media", media.__getitem__)
    made = Preprocessor(renderer, LIMITS)
    await made.learn_item_schemas(media)
    assert made.modalities == (Modality.IMAGE,)
    assert list(made.unserved) == [Modality.VIDEO]
    assert "AttributeError" in made.unserved[Modality.VIDEO]


async def test_preprocessing_is_bounded_in_time(renderer: Renderer) -> None:
    made = Preprocessor(renderer, LIMITS)
    await made.learn_item_schemas([Modality.IMAGE])
    made._threads = BoundedThreads(LIMITS.num_pixels, limit_s=0.0, stuck_after_s=0.0)
    with made._render_lock:  # the thread waits as long as this block takes
        with pytest.raises(PreprocessFailedError):
            await made.prepare(JOB, PICTURE)
        with pytest.raises(EngineFailedError):
            made.check_health()
