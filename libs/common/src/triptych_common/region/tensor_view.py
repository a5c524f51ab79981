"""Views of the region's mapping as torch tensors."""

import math
import weakref
from collections.abc import Callable

import torch

from triptych_common.domain.errors import SpecMismatchError
from triptych_common.protocol.store import Descriptor, DType, TensorSpec
from triptych_common.region.fence import check_descriptor
from triptych_common.region.mapping import RegionMapping

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

MAX_SLOW_THREADS = 2
"""Threads up to which torch's own copy is slower than one thread that streams."""


def tensor_view(
    mapping: RegionMapping, descriptor: Descriptor, on_release: Callable[[], None] | None = None
) -> torch.Tensor:
    """Return the sealed tensor as `[num_embeds, width]`, without a copy. Never write to it.

    `on_release` is called once, when the tensor and everything that shares its memory (slices, views)
    are gone, in whichever thread drops the last of them: it must not block and not raise. It is not
    called when the interpreter exits: the store sees the session end.

    Raises:
        StaleDescriptorError: the entry is no longer there.
        SpecMismatchError: shape, dtype and bytes of the descriptor disagree.
        ValueError: the descriptor points outside the mapping.
    """
    check_descriptor(mapping, descriptor)
    dtype = checked_dtype(descriptor.spec)
    exporter = mapping.exporter(descriptor.offset, descriptor.spec.num_bytes)
    tensor = torch.frombuffer(exporter, dtype=dtype).view(descriptor.spec.shape)
    if on_release is not None:  # last: a caller that gets no tensor is not called back
        # On the exporter, not on the tensor: slices outlive the tensor they were taken from.
        weakref.finalize(exporter, on_release).atexit = False
    return tensor


def write_tensor(mapping: RegionMapping, offset: int, tensor: torch.Tensor) -> None:
    """Copy `tensor` (any device, any strides) to `offset` in the region: one copy, row-major.

    Raises:
        SpecMismatchError: a dtype that does not travel.
        ValueError: the tensor does not lie inside the mapping, or is empty.
    """
    if tensor.dtype not in TORCH_DTYPES.values():
        raise SpecMismatchError("spec_mismatch", f"dtype {tensor.dtype} does not travel")
    if tensor.device.type == "cpu" and tensor.is_contiguous() and torch.get_num_threads() <= MAX_SLOW_THREADS:
        mapping.write(offset, tensor.data_ptr(), tensor.numel() * tensor.element_size())
        return
    exporter = mapping.exporter(offset, tensor.numel() * tensor.element_size())
    torch.frombuffer(exporter, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)


def tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    """Return the spec to reserve for `tensor` (`[num_embeds, width]`).

    Raises:
        SpecMismatchError: not two-dimensional, or empty, or a dtype that does not travel.
    """
    for name, dtype in TORCH_DTYPES.items():
        if dtype == tensor.dtype and tensor.dim() == 2 and tensor.numel() > 0:
            return TensorSpec(
                shape=(tensor.shape[0], tensor.shape[1]),
                dtype=name,
                num_bytes=tensor.numel() * tensor.element_size(),
            )
    raise SpecMismatchError("spec_mismatch", f"{tensor.dtype} of shape {tuple(tensor.shape)} does not travel")


def checked_dtype(spec: TensorSpec) -> torch.dtype:
    """Return the dtype of a spec. Raises SpecMismatchError: shape, dtype and bytes disagree."""
    dtype = TORCH_DTYPES[spec.dtype]
    if math.prod(spec.shape) * dtype.itemsize != spec.num_bytes:
        raise SpecMismatchError(
            "spec_mismatch", f"{spec.dtype} of shape {spec.shape} is not {spec.num_bytes} bytes"
        )
    return dtype


def address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a contiguous `tensor`, and the one after its last."""
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()
