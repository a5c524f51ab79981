"""Every family in the dtype of its published checkpoints: each of its modalities is recorded, and replayed.

The processors run, and no engine: `test_families` compares answers.
"""

import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests.support.families.family import MAX_MODEL_LEN, MediaKind
from tests.support.families.registry import FAMILIES
from triptych_common.domain.media_bounds import AudioBounds, VideoBounds
from triptych_common.protocol.messages import ItemTransfer, Modality
from triptych_encoder.encoding import PreprocessLimits

with warnings.catch_warnings(action="ignore"):  # importing vLLM's models warns, of torch's own use of torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.renderers import renderer_from_config

    from triptych_encoder.engine.encode_engine import EncodeEngine
    from triptych_encoder.preprocessing.preprocessor import reference_media
    from triptych_vllm_connector.records.positions import PositionCheck
    from triptych_vllm_connector.records.replaying import RecordedItems

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]  # transformers' own

MM_HASH = "a" * 64
LIMITS = PreprocessLimits(
    image_formats=("PNG",),
    max_image_pixels=1_000_000,
    processor_options={},
    media_options={},
    video=VideoBounds(60.0, 1_000_000, 1_000_000, 1_000_000),
    audio=AudioBounds(60.0, 1_000_000),
    timeout_s=600.0,
    num_pixels=1_000_000,
    num_threads=1,
    stuck_after_s=600.0,
)


@pytest.mark.parametrize("name", FAMILIES)
async def test_every_modality_is_recorded_in_bfloat16(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    family.make(tmp_path)
    args = AsyncEngineArgs(
        model=str(tmp_path),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_MODEL_LEN,
        limit_mm_per_prompt={str(kind): family.limits.get(kind, 0) for kind in MediaKind},
        mm_processor_cache_gb=0,
    )
    config = args.create_engine_config()
    engine = EncodeEngine(Mock(vllm_config=config, renderer=renderer_from_config(config)), LIMITS)
    engine.widths = dict.fromkeys(Modality, 1)
    await engine.learn_item_schemas()
    assert engine.unserved_modalities == {}
    assert engine.item_limits == {Modality(kind): limit for kind, limit in family.limits.items()}
    model_config = config.model_config
    cache = RecordedItems(PositionCheck.of_model(model_config), model_config.get_vocab_size(), MAX_MODEL_LEN)
    for modality in engine.item_limits:
        media = next(iter(reference_media(modality).values()))
        rendered = engine._render(modality, media, MM_HASH, {})
        record, num_embeds = rendered.prepared.record, rendered.prepared.num_embeds
        cache.items = {
            MM_HASH: ItemTransfer(
                item_index=0, mm_hash=MM_HASH, modality=modality, num_embeds=num_embeds, record=record
            )
        }
        replayed, _ = cache.get_and_update_item(None, MM_HASH)
        assert replayed is not None
        for field, element in replayed.items():
            made = rendered.item[field].data
            assert type(element.data) is type(made), (modality, field)
            if isinstance(made, torch.Tensor):
                assert element.data.dtype is made.dtype, (modality, field)
                assert torch.equal(element.data, made), (modality, field)
            else:
                assert element.data == made, (modality, field)
