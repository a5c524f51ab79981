import pytest

from triptych_common.region.layout import RegionLayout, RegionLayoutError

MIB = 1 << 20


@pytest.mark.parametrize("region", [1 * MIB, 3 * MIB + 17, 256 * MIB, 64 << 30])
@pytest.mark.parametrize("block", [4096, 64 << 10, 2 * MIB])
def test_the_layout_fits_and_wastes_little(region: int, block: int) -> None:
    if region < 4 * block:
        pytest.skip("too small for this block size")
    layout = RegionLayout.fit(region, block)
    assert layout.num_bytes <= region
    assert layout.data_offset % block == 0
    assert layout.offset_of(layout.num_blocks) == layout.num_bytes
    assert layout.entries_offset + layout.num_blocks * 256 <= layout.data_offset
    bigger = RegionLayout(block, layout.num_blocks + 1, layout.num_pin_records)
    assert bigger.num_bytes > region - 2 * block


def test_blocks_for_bytes() -> None:
    layout = RegionLayout.fit(MIB, 4096)
    assert [layout.num_blocks_for(n) for n in (1, 4096, 4097)] == [1, 1, 2]


@pytest.mark.parametrize(("region", "block"), [(100_000, 64 << 10), (0, 4096), (MIB, 5000), (MIB, 0)])
def test_impossible_regions_are_refused(region: int, block: int) -> None:
    with pytest.raises(RegionLayoutError):
        RegionLayout.fit(region, block)
