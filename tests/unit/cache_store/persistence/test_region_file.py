"""What is wrong with a region is reported at the start, in plain text."""

import os
from pathlib import Path

import pytest

from triptych_cache_store.persistence.region_file import RegionFile
from triptych_common.region.layout import RegionLayout, RegionLayoutError

LAYOUT = RegionLayout.fit(1 << 20, 4096)
OTHER = RegionLayout.fit(2 << 20, 4096)


def make(path: Path, layout: RegionLayout = LAYOUT, now: float = 1000.0) -> RegionFile:
    return RegionFile.open(path, layout, now)


def test_a_region_is_taken_up_with_a_later_generation(tmp_path: Path) -> None:
    first = make(tmp_path / "region")
    first.buffer[LAYOUT.data_offset] = 7
    first.close(unlink=False)
    for now, generation in ((500.0, 1001), (5000.0, 5000)):
        again = make(tmp_path / "region", now=now)
        assert not again.is_new
        assert again.header.region_id == first.header.region_id
        assert again.header.generation == generation
        assert again.buffer[LAYOUT.data_offset] == 7
        again.close(unlink=False)


def test_another_size_replaces_the_file(tmp_path: Path) -> None:
    first = make(tmp_path / "region")
    first.close(unlink=False)
    second = make(tmp_path / "region", OTHER)
    assert second.is_new
    assert second.header.region_id != first.header.region_id
    second.close(unlink=True)


def test_a_start_that_was_cut_off_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    for content in (b"", bytes(100), bytes(8192)):
        path = tmp_path / "region"
        path.write_bytes(content)
        path.chmod(0o600)
        region = make(path)
        assert region.is_new
        region.close(unlink=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"something else" * 1000, "not a region"), (b"TRIPTYCH\x07" + bytes(9000), "version 7")],
)
def test_a_file_that_is_not_ours_stays(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "region"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(RegionLayoutError, match=message):
        make(path)
    assert path.read_bytes() == content


def test_a_damaged_or_cut_region_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "region"
    make(path).close(unlink=False)
    os.truncate(path, LAYOUT.num_bytes - 4096)
    with pytest.raises(RegionLayoutError, match="bytes, not what its header says"):
        make(path)
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    with pytest.raises(RegionLayoutError, match="damaged"):
        make(path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"")
    (tmp_path / "region").symlink_to(tmp_path / "target")
    with pytest.raises(RegionLayoutError):
        make(tmp_path / "region")


def test_prefault_reports_a_tmpfs_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    region = make(tmp_path / "region")
    failures: list[str] = []

    def refuse(fd: int, offset: int, num_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    region.start_prefault(failures.append)
    assert not region.wait_prefaulted(5.0)
    assert failures == ["the tmpfs has no memory for the region: No space left on device"]
    region.close(unlink=True)


def test_prefault_takes_the_whole_file(tmp_path: Path) -> None:
    region = make(tmp_path / "region")
    region.start_prefault(pytest.fail)
    assert region.wait_prefaulted(5.0)
    assert region.path.stat().st_blocks * 512 >= LAYOUT.num_bytes
    region.close(unlink=True)
