"""Puts the region's memory beside the GPU: copies over another socket's link are slower."""

import ctypes
import mmap
import os
import platform
from pathlib import Path

from triptych_common.region.mapping import address_of
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

SYSFS = Path("/sys")
MBIND = {"x86_64": 237, "aarch64": 235}  # glibc has no function for it
MPOL_PREFERRED = 1
NVIDIA, DISPLAY_CLASS = "0x10de", "0x03"


def region_node(sysfs: Path, gpu_bus_id: str | None) -> int | None:
    """NUMA node of the GPU at `gpu_bus_id`; if that is None, the one that all NVIDIA GPUs have in common.

    None: the machine has one node, or it is not known.
    """
    if len(list((sysfs / "devices/system/node").glob("node[0-9]*"))) < 2:
        return None
    devices = sysfs / "bus/pci/devices"
    if gpu_bus_id is not None:
        folders = [devices / gpu_bus_id.lower()]
    else:
        folders = [each for each in devices.glob("*") if _is_gpu(each)]
    nodes = {_read(each / "numa_node") for each in folders}
    node = nodes.pop() if len(nodes) == 1 else ""
    return int(node) if node.isdecimal() else None  # "-1": the firmware does not say


def prefer_node(memory: mmap.mmap, node: int) -> bool:
    """Make the kernel take memory's pages from `node` while it has some; False if it refuses.

    The policy is that of the file's pages, so it holds for every process that maps them.
    """
    number = MBIND.get(platform.machine())
    if number is None:
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    num_words = node // 64 + 1
    mask = (ctypes.c_uint64 * num_words)()
    mask[node // 64] = 1 << node % 64
    address, num_bytes = ctypes.c_void_p(address_of(memory)), ctypes.c_size_t(len(memory))
    max_node = ctypes.c_ulong(64 * num_words + 1)
    result = call(
        ctypes.c_long(number),
        address,
        num_bytes,
        ctypes.c_int(MPOL_PREFERRED),
        mask,
        max_node,
        ctypes.c_uint(0),
    )
    if result != 0:
        log.warning("region not put beside the GPU", node=node, error=os.strerror(ctypes.get_errno()))
    return bool(result == 0)


def _is_gpu(device: Path) -> bool:
    return _read(device / "vendor") == NVIDIA and _read(device / "class").startswith(DISPLAY_CLASS)


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
