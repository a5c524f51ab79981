"""Makes `import torchvision` work where its compiled operators cannot load. Runs at interpreter start.

Beside a CPU build of torch, package indexes offer a CUDA build of torchvision, whose import fails with
`operator torchvision::nms does not exist`. Its Python transforms, all that image processors use, work
once the two operators' schemas exist. vLLM imports torchvision in processes that it starts by itself
(to inspect a model's class, for one), before any plugin: so the schemas are defined by an import hook,
which a `.pth` file puts in place. It costs nothing until torchvision is imported.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version

_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


class TorchvisionHook(MetaPathFinder):
    """Import hook that finds nothing, but prepares torchvision's import when it is first requested."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            _define_schemas_if_mismatched()
        return None


def _define_schemas_if_mismatched() -> None:
    """Define schemas for a CPU build of torch beside a torchvision without `+cpu` in its version."""
    try:
        if "+cpu" in version("torchvision"):
            return
    except PackageNotFoundError:
        return
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None:
        return
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", schema)


if not any(isinstance(finder, TorchvisionHook) for finder in sys.meta_path):
    sys.meta_path.insert(0, TorchvisionHook())
