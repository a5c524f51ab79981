"""DeepStack without a vision tower: models whose towers also feed the language model's first layers.

vLLM 0.32 makes no room for those inputs where the tower is not loaded, whoever made them: Qwen3-VL raises,
and Qwen3-Omni answers wrongly. Its models ask whether their tower is a `StageMissingLayer`; here none is.
"""

import sys
from typing import Any

from vllm.model_executor.model_loader.utils import get_model_cls

_MODELS = "vllm.model_executor.models."
MODULES = tuple(_MODELS + name for name in ("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker"))


class _NoLayer:
    """Nothing is an instance of it."""


def keep_deepstack(model_config: Any) -> None:
    """Before the model is built. `model_config`: vLLM's."""
    get_model_cls(model_config)  # imports its module, and those of the models that it extends
    for name in MODULES:
        if name in sys.modules:
            sys.modules[name].StageMissingLayer = _NoLayer  # type: ignore[attr-defined]
