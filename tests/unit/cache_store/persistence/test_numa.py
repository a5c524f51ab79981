"""The NUMA node of the region's memory, on made-up machines; and the kernel's answer on this one."""

import mmap
from pathlib import Path

import pytest

from triptych_cache_store.persistence.region_file import prefer_node, region_node

NVIDIA = ("0x10de", "0x030200")


def machine(folder: Path, num_nodes: int, *devices: tuple[str, tuple[str, str], int]) -> Path:
    """A /sys with so many nodes, and devices by bus id, (vendor, class) and node."""
    for number in range(num_nodes):
        (folder / f"devices/system/node/node{number}").mkdir(parents=True)
    for bus_id, (vendor, device_class), node in devices:
        device = folder / "bus/pci/devices" / bus_id
        device.mkdir(parents=True)
        for name, text in (("vendor", vendor), ("class", device_class), ("numa_node", str(node))):
            (device / name).write_text(f"{text}\n")
    return folder


def test_the_node_of_the_slabs_gpu(tmp_path: Path) -> None:
    sysfs = machine(tmp_path, 2, ("0000:3b:00.0", NVIDIA, 0), ("0000:af:00.0", NVIDIA, 1))
    assert region_node(sysfs, "0000:AF:00.0") == 1, "CUDA writes it in capitals"
    assert region_node(sysfs, "0000:3B:00.0") == 0


def test_without_a_slab_the_node_that_all_gpus_have_in_common(tmp_path: Path) -> None:
    network = ("0x15b3", "0x020000")
    audio = ("0x10de", "0x040300")
    sysfs = machine(
        tmp_path, 2, ("0000:3b:00.0", NVIDIA, 1), ("0000:3b:00.1", audio, 0), ("0000:5e:00.0", network, 0)
    )
    assert region_node(sysfs, None) == 1


@pytest.mark.parametrize(
    ("num_nodes", "nodes"),
    [(1, (0,)), (2, (0, 1)), (2, ()), (2, (-1,))],
    ids=["one", "both", "none", "unknown"],
)
def test_no_node_where_there_is_no_choice(tmp_path: Path, num_nodes: int, nodes: tuple[int, ...]) -> None:
    devices = [(f"0000:{number}b:00.0", NVIDIA, node) for number, node in enumerate(nodes)]
    assert region_node(machine(tmp_path, num_nodes, *devices), None) is None


def test_a_machine_without_sysfs_or_with_another_bus(tmp_path: Path) -> None:
    assert region_node(tmp_path, None) is None
    assert region_node(machine(tmp_path, 2), "0000:3b:00.0") is None


def test_the_kernel_takes_the_call_and_refuses_a_node_that_is_not_there() -> None:
    memory = mmap.mmap(-1, 1 << 20)
    assert not prefer_node(memory, 1000)
    memory[:4] = b"used"
