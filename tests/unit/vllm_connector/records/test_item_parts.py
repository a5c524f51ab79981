"""vLLM's parser of content parts: an item's URL is what a part with its uuid is; others are 400."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.item_records import item_record
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.item_urls import item_url, raw_item_url
from triptych_common.protocol.messages import ItemTransfer, Modality

pytest.importorskip("vllm")
from vllm.exceptions import VLLMValidationError

from triptych_vllm_connector.records.replaying import ItemUrlParser, request_items

IMAGE, SOUND, OTHER = (MmHash(digit * 64) for digit in "abc")


class Tracker:
    """What vLLM's tracker of a request's items is given."""

    media_io_kwargs = None
    allowed_local_media_path = ""
    allowed_media_domains = None

    def __init__(self) -> None:
        self.items: list[tuple[str, Any]] = []
        self.model_config = SimpleNamespace(
            get_multimodal_config=lambda: SimpleNamespace(enable_mm_embeds=True)
        )

    def add(self, modality: str, item: Any) -> str:
        self.items.append((modality, item))
        return f"<{modality}>"


@pytest.fixture
def tracker() -> Tracker:
    tracker = Tracker()
    items = [
        ItemTransfer(
            item_index=index,
            mm_hash=mm_hash,
            modality=modality,
            num_embeds=4,
            record=item_record(4, (1, 4, 4)),
        )
        for index, (mm_hash, modality) in enumerate(((IMAGE, Modality.IMAGE), (SOUND, Modality.AUDIO)))
    ]
    request_items.set({item.mm_hash: item for item in items})
    return tracker


def parse(tracker: Tracker, url: str | None, uuid: str | None = None) -> ItemUrlParser:
    parser = ItemUrlParser(tracker)
    parser.parse_image(url, uuid)
    return parser


async def test_an_item_of_the_request_is_metadata_with_its_uuid(tracker: Tracker) -> None:
    parser = parse(tracker, item_url(IMAGE))
    [(modality, item)] = tracker.items
    assert (modality, await item()) == ("image_embeds", (None, IMAGE))
    other = Tracker()
    ItemUrlParser(other).parse_image_embeds(None, IMAGE)
    [(as_part, _)] = other.items
    assert as_part == modality
    assert list(parser.mm_placeholder_storage().values()) == [["<image_embeds>"]]


async def test_raw_media_keep_the_name_that_comes_with_them(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    async def fetch(url: str) -> str:
        fetched.append(url)
        return "image"

    for url, uuid, expected in (
        (raw_item_url(OTHER, "data:image/png;base64,AAAA"), None, OTHER),
        ("data:image/png;base64,BBBB", "mine", "mine"),
    ):
        parser = ItemUrlParser(tracker)
        monkeypatch.setitem(parser.__dict__, "_connector", SimpleNamespace(fetch_image_async=fetch))
        parser.parse_image(url, uuid)
        modality, item = tracker.items[-1]
        assert (modality, await item()) == ("image", ("image", expected))
    assert fetched == ["data:image/png;base64,AAAA", "data:image/png;base64,BBBB"]


@pytest.mark.parametrize(
    "url", [item_url(OTHER), item_url(SOUND), "triptych-item:", f"triptych-item:{IMAGE},https://host/"]
)
def test_any_other_of_the_scheme_is_refused(tracker: Tracker, url: str) -> None:
    with pytest.raises(VLLMValidationError):
        parse(tracker, url)
    assert not tracker.items
