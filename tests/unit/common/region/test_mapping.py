import ctypes
from pathlib import Path

import pytest

from triptych_common.domain.errors import StoreUnavailableError
from triptych_common.region.mapping import RegionMapping

SIZE = 1 << 16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "region"
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    return path


@pytest.mark.parametrize("writable", [True, False])
def test_the_address_is_where_the_bytes_are(path: Path, writable: bool) -> None:
    mapping = RegionMapping.open(path, SIZE, writable=writable)
    assert (
        ctypes.string_at(mapping.address + 300, 4) == bytes(mapping.view(300, 4)) == bytes([44, 45, 46, 47])
    )
    mapping.close()


def test_two_mappings_share_their_bytes(path: Path) -> None:
    one, two = RegionMapping.open(path, SIZE), RegionMapping.open(path, SIZE)
    one.view(100, 5)[:] = b"hello"
    assert bytes(two.view(100, 5)) == b"hello"


@pytest.mark.parametrize(("offset", "num_bytes"), [(-1, 4), (0, 0), (SIZE, 1), (SIZE - 3, 4), (0, SIZE + 1)])
def test_no_view_outside(path: Path, offset: int, num_bytes: int) -> None:
    mapping = RegionMapping.open(path, SIZE)
    with pytest.raises(ValueError, match="outside"):
        mapping.view(offset, num_bytes)
    with pytest.raises(ValueError, match="outside"):
        mapping.exporter(offset, num_bytes)


def test_views_outlive_the_mapping(path: Path) -> None:
    mapping = RegionMapping.open(path, SIZE)
    view, exporter = mapping.view(0, 4), mapping.exporter(0, 4)
    mapping.close()
    mapping.close()
    assert bytes(view) == bytes(exporter) == b"\x00\x01\x02\x03"
    with pytest.raises(ValueError, match="closed"):
        mapping.view(0, 4)


def test_a_read_only_mapping_exports_nothing_to_write(path: Path) -> None:
    mapping = RegionMapping.open(path, SIZE, writable=False)
    assert mapping.view(0, 4).readonly
    with pytest.raises(ValueError, match="read-only"):
        mapping.exporter(0, 4)


def test_what_cannot_be_mapped(path: Path) -> None:
    with pytest.raises(StoreUnavailableError):
        RegionMapping.open(path.with_name("missing"), SIZE)
    with pytest.raises(StoreUnavailableError, match="shorter"):
        RegionMapping.open(path, SIZE + 1)


def test_populating_ends_and_changes_nothing(path: Path) -> None:
    for writable in (True, False):
        mapping = RegionMapping.open(path, SIZE, writable=writable)
        assert mapping.wait_populated(5.0)
        assert bytes(mapping.view(0, SIZE)) == path.read_bytes()
        mapping.close()
    assert RegionMapping.open(path, SIZE, populate=False).wait_populated(0.0)
