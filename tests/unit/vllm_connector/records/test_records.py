"""What the encoder's renderer made of an item, replayed: equal, or refused before the engine has it."""

import warnings
from array import array
from collections.abc import Callable, Mapping
from typing import Any, get_args

import pytest
import torch

from tests.support.item_records import item_record
from triptych_common.protocol.item_record import ArrayDtype, ItemRecord, PackedArray
from triptych_common.protocol.messages import ItemTransfer, Modality

with warnings.catch_warnings(action="ignore"):  # importing vLLM's models warns, of torch's own use of torch
    from transformers import Qwen2_5_VLConfig
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
    from vllm.multimodal.inputs import (
        BaseMultiModalField,
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalFlatField,
        MultiModalKwargsItem,
        MultiModalSharedField,
    )
    from vllm.multimodal.processing.processor import (
        PromptIndexTargets,
        PromptUpdateDetails,
        ResolvedPromptUpdate,
        UpdateMode,
    )

    from triptych_vllm_connector.records import positions
    from triptych_vllm_connector.records.packing import NotRecordableError
    from triptych_vllm_connector.records.positions import PositionCheck, outline_of
    from triptych_vllm_connector.records.recording import MAX_UNDECLARED_BYTES, record_of
    from triptych_vllm_connector.records.replaying import RecordedItems

PAD, START = 7, 5
HASH = "a" * 64
VOCAB_SIZE = 1000
ON_CPU = MultiModalBatchedField(keep_on_cpu=True)


def element(data: Any, field: BaseMultiModalField) -> MultiModalFieldElem:
    return MultiModalFieldElem(data=data, field=field)


def update(
    tokens: list[int], is_embed: Callable[[list[int]], Any] | None = None, target: Any = None
) -> ResolvedPromptUpdate:
    details = PromptUpdateDetails(tokens, is_embed)
    return ResolvedPromptUpdate("image", 0, UpdateMode.REPLACE, target or [PAD], details)


def recorded(
    record: ItemRecord | None, num_embeds: int = 4, check: PositionCheck | None = None
) -> RecordedItems:
    cache = RecordedItems(check or PositionCheck(None), VOCAB_SIZE, max_num_tokens=100)
    cache.items = {
        HASH: ItemTransfer(
            item_index=0, mm_hash=HASH, modality=Modality.IMAGE, num_embeds=num_embeds, record=record
        )
    }
    return cache


def grid_item(grid: tuple[int, ...]) -> MultiModalKwargsItem:
    return MultiModalKwargsItem(
        {
            "pixel_values": element(torch.zeros(16, 8), MultiModalFlatField(slices=[slice(0, 16)])),
            "image_grid_thw": element(torch.tensor(grid), MultiModalBatchedField(keep_on_cpu=True)),
        }
    )


def replay(record: ItemRecord) -> tuple[MultiModalKwargsItem, Any]:
    sent = ItemRecord.model_validate_json(record.model_dump_json(), strict=True)
    item, (replayed,) = recorded(sent).get_and_update_item(None, HASH)
    assert item is not None
    return item, replayed


def test_what_the_language_model_reads_is_replayed_and_pixels_are_not() -> None:
    fields: Mapping[str, MultiModalFieldElem] = {
        "pixel_values": element(torch.zeros(16, 8), MultiModalFlatField(slices=[slice(0, 16)])),
        "grid": element(torch.tensor([1, 4, 4]), MultiModalBatchedField(keep_on_cpu=True)),
        "mask": element(torch.ones(2, 300).bool(), MultiModalFlatField(slices=[slice(0, 2)], dim=1)),
        "seconds": element(0.5, MultiModalSharedField(batch_size=3)),
        "stamps": element([0.0, 1.5], MultiModalBatchedField()),
        "nothing": element(torch.zeros(0, 2), MultiModalBatchedField()),
    }
    record = record_of(
        MultiModalKwargsItem(fields),
        [update([START, PAD, PAD, PAD, PAD], lambda full: torch.tensor(full) == PAD)],
        declared={"mask", "seconds", "stamps", "nothing"},
    )
    item, replayed = replay(record)
    assert set(item) == set(fields) - {"pixel_values"}
    for name, made in item.items():
        assert made == fields[name]
        assert made.field.keep_on_cpu is fields[name].field.keep_on_cpu
    assert item["mask"].field.dim == 1
    assert (replayed.modality, replayed.mode, replayed.target) == ("image", UpdateMode.REPLACE, [PAD])
    assert replayed.content.full == [START, PAD, PAD, PAD, PAD]
    assert replayed.content.is_embed(replayed.content.full).tolist() == [False, True, True, True, True]


@pytest.mark.parametrize("dtype", get_args(ArrayDtype))
@pytest.mark.parametrize("shape", [(), (0, 2), (3, 2)])
def test_a_field_keeps_its_dtype(dtype: ArrayDtype, shape: tuple[int, ...]) -> None:
    value = torch.randint(0, 100, (*shape, 3)).div(8).to(getattr(torch, dtype))[..., 0]  # not contiguous
    record = record_of(MultiModalKwargsItem({"x": element(value, ON_CPU)}), [update([PAD] * 4)], ())
    item, _ = replay(record)
    got = item["x"].data
    assert isinstance(got, torch.Tensor)
    assert (got.dtype, got.shape) == (value.dtype, value.shape)
    assert torch.equal(got, value)


def test_without_a_mask_all_tokens_are_embeddings() -> None:
    _, replayed = replay(record_of(MultiModalKwargsItem(), [update([PAD] * 4)], ()))
    assert replayed.content.is_embed is None


@pytest.mark.parametrize(
    ("item", "updates"),
    [
        pytest.param({}, [], id="no update"),
        pytest.param({}, [update([PAD], target=PromptIndexTargets.start())], id="found by place"),
        pytest.param({"x": element(torch.zeros(1, dtype=torch.cfloat), ON_CPU)},
                     [update([PAD])], id="complex numbers"),
        pytest.param({"x": element([torch.zeros(1)], ON_CPU)},
                     [update([PAD])], id="tensors in a list"),
    ],
)  # fmt: skip
def test_what_no_record_can_hold_is_said(
    item: dict[str, MultiModalFieldElem], updates: list[ResolvedPromptUpdate]
) -> None:
    with pytest.raises(NotRecordableError):
        record_of(MultiModalKwargsItem(item), updates, ())


def with_tokens(*tokens: int) -> ItemRecord:
    content = array("i", tokens).tobytes()
    packed = PackedArray.pack("int32", (len(tokens),), content)
    (made,) = item_record(1).updates
    return ItemRecord(updates=(made.model_copy(update={"tokens": packed}),))


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(None, id="none"),
        pytest.param(item_record(5), id="more rows"),
        pytest.param(item_record(3), id="fewer rows"),
        pytest.param(item_record(200), id="longer than the context"),
        pytest.param(with_tokens(1, 2, 3, VOCAB_SIZE), id="no token of the model"),
        pytest.param(with_tokens(1, 2, 3, -1), id="a negative token"),
        pytest.param(with_tokens(), id="no token"),
    ],
)
def test_a_record_of_another_item_or_model_is_refused(record: ItemRecord | None) -> None:
    with pytest.raises(ValueError):
        recorded(record).get_and_update_item(None, HASH)


def test_an_item_with_media_is_processed_as_ever() -> None:
    made = (MultiModalKwargsItem(), [update([PAD])])
    cache = recorded(None)
    assert not cache.is_cached_item("b" * 64)
    assert cache.get_and_update_item(made, "b" * 64) is made


@pytest.fixture(scope="module")
def qwen() -> PositionCheck:
    config = Qwen2_5_VLConfig()
    return PositionCheck(outline_of(Qwen2_5_VLForConditionalGeneration, config))


def test_a_grid_that_fits_its_tokens_is_taken(qwen: PositionCheck) -> None:
    record = record_of(grid_item((1, 4, 4)), [update([PAD] * 4)], ())
    item, _ = recorded(record, check=qwen).get_and_update_item(None, HASH)
    assert item is not None


@pytest.mark.parametrize("grid", [(1, 4, 6), (1, 1, 16), (1, 4), (0, 4, 4), (-1, -4, 4), (1 << 40, 4, 4)])
def test_a_grid_that_does_not_fit_its_tokens_is_refused(qwen: PositionCheck, grid: tuple[int, ...]) -> None:
    record = record_of(grid_item(grid), [update([PAD] * 4)], ())
    with pytest.raises(ValueError, match=r"fields|grid"):
        recorded(record, check=qwen).get_and_update_item(None, HASH)


def test_a_check_that_another_thread_gives_up_meanwhile_refuses_nothing(
    qwen: PositionCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = PositionCheck(qwen._outline)

    def give_up(item: Any) -> int:
        check._outline = None
        return 0

    monkeypatch.setattr(positions, "_largest_product", give_up)
    check.check("image", grid_item((1, 4, 4)), [PAD] * 4, None)
    assert check._outline is None


def test_a_missing_grid_is_refused(qwen: PositionCheck) -> None:
    with pytest.raises(ValueError, match="fields"):
        recorded(item_record(4), check=qwen).get_and_update_item(None, HASH)


def test_a_large_field_that_nothing_is_known_of_is_no_part_of_a_record() -> None:
    pixels = torch.zeros(MAX_UNDECLARED_BYTES // 4 + 1)
    for field, declared in ((ON_CPU, ()), (MultiModalBatchedField(), ("patches",))):
        record_of(MultiModalKwargsItem({"patches": element(pixels, field)}), [update([PAD])], declared)
    item = MultiModalKwargsItem({"patches": element(pixels, MultiModalBatchedField())})
    with pytest.raises(NotRecordableError, match="patches"):
        record_of(item, [update([PAD])], ())
