"""Checks on the tower, at start, that the rows of a video's step do not depend on its other steps.

A dummy video of two steps with random patches is encoded whole, then with other patches in one of them: the
rows of the unchanged step must stay, bit for bit. Then with the same patches in both: both must have equal
rows. Then each step by itself: its rows must be those of the whole. In the last two, sums in another order
may round differently.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem
from vllm.multimodal.utils import group_and_batch_mm_kwargs
from vllm.utils.torch_utils import PIN_MEMORY

from triptych_common.domain.transient import is_transient
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.records.video_steps import GRID_SUFFIX, NotInStepsError, cut_steps, repeat_step

log = get_logger(__name__)

MODALITY = "video"
SEED = 1
MAX_ERROR_CHARS = 500


@dataclass(frozen=True)
class StepCheck:
    """Result of the check; `why` is the reason not to divide a video, or "" if it may be divided."""

    why: str
    difference: float = 0.0  # the largest between a step by itself and in the whole
    scale: float = 0.0  # the largest number in the whole


@torch.inference_mode()
def check_steps(worker: Any) -> StepCheck:
    """Run the check on every rank at once; `worker` is vLLM's. Never raises."""
    try:
        try:
            return _find_out(worker)
        except Exception as error:
            if not is_transient(error):
                raise
            log.info("video steps are checked again", error=_text(error))
        return _find_out(worker)
    except Exception as error:  # whatever the model's code makes of a video that no processor has made
        log.warning("video steps not checked", error=_text(error))
        if is_transient(error):
            return StepCheck(f"not known: the machine failed twice, {_text(error)}")
        return StepCheck("the tower does not take a part by itself, or no dummy video could be made")


def _text(error: Exception) -> str:
    return repr(error)[:MAX_ERROR_CHARS]


def _find_out(worker: Any) -> StepCheck:
    runner = worker.model_runner
    budget = MultiModalBudget(worker.vllm_config, MULTIMODAL_REGISTRY, enable_cache=False)
    if MODALITY not in budget.mm_max_toks_per_item:
        return StepCheck("the model takes no videos")
    if worker.vllm_config.model_config.is_mm_prefix_lm:
        return StepCheck("the language model attends to what comes later in an item")
    model = runner.get_model()
    if getattr(model, "is_multimodal_pruning_enabled", False):
        return StepCheck("rows of videos are pruned")
    dummies = budget.get_dummy_encoder_profile_inputs(MODALITY, 1)
    if not dummies:
        return StepCheck("there is no dummy video")
    dummy = dummies[0][1]
    generator = torch.Generator().manual_seed(SEED)
    try:
        whole = _with_other_patches(repeat_step(dummy, 2), 0, 2, generator)
        parts = cut_steps(whole, 0, 1), cut_steps(whole, 1, 2)
    except NotInStepsError as error:
        return StepCheck(str(error))
    first_kept = _with_other_patches(whole, 1, 2, generator)
    second_kept = _with_other_patches(whole, 0, 1, generator)

    def encode(item: MultiModalKwargsItem) -> torch.Tensor:
        _, _, fields = next(
            group_and_batch_mm_kwargs([(MODALITY, item)], device=runner.device, pin_memory=PIN_MEMORY)
        )
        (rows,) = model.embed_multimodal(**fields)
        return rows

    return compared(
        encode(whole),
        encode(first_kept),
        encode(second_kept),
        encode(repeat_step(whole, 2)),
        [*map(encode, parts)],
    )


def compared(
    whole: torch.Tensor,
    first_kept: torch.Tensor,
    second_kept: torch.Tensor,
    repeated: torch.Tensor,
    parts: list[torch.Tensor],
) -> StepCheck:
    """Compare the rows of the encodes.

    `first_kept` and `second_kept` are rows of videos that share that step with the whole; `repeated` has the
    first step twice; `parts` has each step by itself.
    """
    end = parts[0].shape[0]
    if whole.shape != (end + parts[1].shape[0], *parts[0].shape[1:]):
        return StepCheck("a part has other rows than in the whole")
    if not (torch.equal(whole[:end], first_kept[:end]) and torch.equal(whole[end:], second_kept[end:])):
        return StepCheck("rows depend on other steps")
    if torch.equal(whole[end:], first_kept[end:]) or torch.equal(whole[:end], second_kept[:end]):
        return StepCheck("rows do not depend on their patches")
    difference = float((torch.cat(parts).float() - whole.float()).abs().max())
    scale = float(whole.float().abs().max())
    eps = torch.finfo(whole.dtype).eps
    if not float((repeated[:end].float() - repeated[end:].float()).abs().max()) <= 4 * eps * scale:
        return StepCheck("rows depend on the time of their step", difference, scale)
    if not difference <= eps**0.5 * scale:  # a sum of many rounds more than once
        return StepCheck("a part by itself is encoded otherwise", difference, scale)
    return StepCheck("", difference, scale)


def _with_other_patches(
    item: MultiModalKwargsItem, first: int, end: int, generator: torch.Generator
) -> MultiModalKwargsItem:
    """Item with random patches in the steps from `first` up to `end`."""

    def data_of(data: Any) -> Any:
        if not isinstance(data, torch.Tensor) or data.ndim < 2:
            return data
        of_step = data.shape[0] // 2
        other = data.clone()
        part = other[first * of_step : end * of_step]
        if data.is_floating_point():
            part.copy_(torch.randn(part.shape, generator=generator))
        else:
            part.copy_(torch.randint(0, 256, part.shape, generator=generator))
        return other

    return MultiModalKwargsItem(
        {
            name: each
            if name.endswith(GRID_SUFFIX)
            else MultiModalFieldElem(data=data_of(each.data), field=each.field)
            for name, each in item.items()
        }
    )
