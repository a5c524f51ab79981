"""Checks that the model can place an item of these fields among the prompt's tokens.

Models with positions in several dimensions (M-RoPE) compute them from an item's fields, a grid for example,
inside the worker, where a grid that does not fit the tokens would end the engine. So the same code runs here
first, on the item alone, with an object that has the model's configuration and nothing else.
"""

import math
from typing import Any

import torch
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.model_executor.models.interfaces import supports_mrope
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange

from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)


MAX_CELLS_PER_TOKEN = 256  # of a grid; towers merge 4, as a rule
MAX_GRID_VALUES = 16
PLAIN_TOKEN = 0  # of text


class _MissingAttributeError(AttributeError):
    """The model's code needs more of the model than its configuration."""


def outline_of(model_cls: type, config: Any) -> Any:
    """Object of the model's class without its layers; `config` is transformers'."""

    def missing(_: Any, name: str) -> Any:
        raise _MissingAttributeError(name)

    outline: Any = object.__new__(type("Outline", (model_cls,), {"__getattr__": missing}))
    torch.nn.Module.__init__(outline)
    outline.config = config
    return outline


class PositionCheck:
    def __init__(self, outline: Any | None) -> None:
        """`outline` computes positions; None if they follow from the number of tokens."""
        self._outline = outline

    @classmethod
    def of_model(cls, model_config: Any) -> "PositionCheck":
        """Check for a model; `model_config` is vLLM's."""
        model_cls: Any = get_model_cls(model_config)
        if not (model_config.uses_mrope and supports_mrope(model_cls)):
            return cls(None)
        hf_config = model_config.hf_config
        return cls(outline_of(model_cls, getattr(hf_config, "thinker_config", hf_config)))

    def check(
        self, modality: str, item: MultiModalKwargsItem, tokens: list[int], is_embed: torch.Tensor | None
    ) -> None:
        """Raise ValueError if the fields do not fit the tokens that stand for the item."""
        outline = self._outline  # another thread may find meanwhile that it cannot be used
        if outline is None:
            return
        if _largest_product(item) > MAX_CELLS_PER_TOKEN * len(tokens):  # or the code below would make them
            raise ValueError("the item's grid is too large for its tokens")
        # In a prompt the item has others around it, and some models count the one behind it to the item.
        prompt = [PLAIN_TOKEN, *tokens, PLAIN_TOKEN]
        position = PlaceholderRange(offset=1, length=len(tokens), is_embed=is_embed)
        feature = MultiModalFeatureSpec(
            data=item, modality=modality, identifier="", mm_position=position, mm_hash=""
        )
        try:
            positions, _ = outline.get_mrope_input_positions(prompt, [feature])
        except _MissingAttributeError as error:
            log.warning("positions of items are not checked for this model", attribute=str(error))
            self._outline = None
            return
        except Exception as error:  # whatever the model's code makes of strange fields
            raise ValueError("the item's fields do not fit its tokens") from error
        if positions.shape[-1] != len(prompt):
            raise ValueError("the item's fields do not fit the number of its tokens")


def _largest_product(item: MultiModalKwargsItem) -> int:
    """Largest product of the whole numbers in a small field: the cells of a grid, or a length."""
    fields = [element.data for element in item.values() if isinstance(element.data, torch.Tensor)]
    small = [data for data in fields if data.numel() <= MAX_GRID_VALUES and not data.is_floating_point()]
    return max((math.prod(abs(value) for value in data.flatten().tolist()) for data in small), default=0)
