"""Calls something before each layer of a vision tower."""

from collections.abc import Callable
from typing import Any

from torch import nn


def before_each_layer(model: nn.Module, action: Callable[[], None]) -> int:
    """Have `action` called before each layer: each member of the model's lists of modules that holds others.

    Returns their number. `forward` is replaced rather than hooked, since modules that vLLM may compile do not
    call hooks. Layers within layers are left out.
    """
    layers: dict[int, nn.Module] = {}
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inside:
            for layer in module:
                layers[id(layer)] = layer
                inside.update(id(each) for each in layer.modules())
    for layer in layers.values():
        layer.forward = _announced(layer.forward, action)
    return len(layers)


def _announced(forward: Callable[..., Any], action: Callable[[], None]) -> Callable[..., Any]:
    def announced(*args: Any, **kwargs: Any) -> Any:
        action()
        return forward(*args, **kwargs)

    return announced
