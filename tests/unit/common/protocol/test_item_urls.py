"""URLs of media items: written and read back; anything else of the scheme is refused."""

import pytest

from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.item_urls import ItemUrl, item_url, parse_item_url, raw_item_url

ITEM = MmHash("0a" * 32)


def test_they_are_read_as_they_were_written() -> None:
    assert parse_item_url(item_url(ITEM)) == ItemUrl(ITEM, None)
    assert parse_item_url(raw_item_url(ITEM, "data:image/png;base64,AA,A")) == ItemUrl(
        ITEM, "data:image/png;base64,AA,A"
    )


@pytest.mark.parametrize("url", ["", "data:,", "https://host/triptych-item:", f" triptych-item:{ITEM}", ITEM])
def test_other_urls_are_left_to_others(url: str) -> None:
    assert parse_item_url(url) is None


@pytest.mark.parametrize(
    "rest",
    ["", ITEM[:-1], ITEM + "0", ITEM.upper(), f"{ITEM}\n", f"{ITEM},", f"{ITEM},http://host/", f"{ITEM}#"],
)
def test_what_says_nothing_is_refused(rest: str) -> None:
    with pytest.raises(ValueError, match="malformed"):
        parse_item_url("triptych-item:" + rest)
