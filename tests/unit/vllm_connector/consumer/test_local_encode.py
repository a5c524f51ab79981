"""Which requests an instance with a vision tower encodes itself."""

from tests.support.vllm_connector.fake_engine import FakeFeature, FakePosition, FakeRequest
from triptych_vllm_connector.consumer.local_encode import LocalEncode, encodes_no_request

METADATA = {"image_grid_thw": 1}
MEDIA = {"pixel_values": 1, **METADATA}
EMBEDS = {"image_embeds": 1, **METADATA}


def encodes(*datas: dict[str, object] | None, params: dict[str, object] | None = None) -> bool:
    tower = LocalEncode(lambda modality: set(METADATA) if modality == "image" else set())
    features = [FakeFeature("x", FakePosition(0, 1, 1), data) for data in datas]
    return tower.encodes_request(FakeRequest("r", features, params))


def test_raw_media_are_encoded_here() -> None:
    assert encodes(MEDIA)
    assert encodes(MEDIA, MEDIA)


def test_metadata_never_are() -> None:
    assert not encodes(METADATA)
    assert not encodes(MEDIA, METADATA)
    assert not encodes(None), "kept in a cache elsewhere"
    assert not encodes({})


def test_what_a_gateway_sent_for_encoders_is_left_to_them() -> None:
    assert not encodes(MEDIA, params={"request_id": "r"})


def test_embeddings_need_no_tower() -> None:
    """vLLM passes them through where it would encode."""
    assert encodes(EMBEDS)


def test_without_a_tower_nothing_is() -> None:
    assert not encodes_no_request(FakeRequest("r", [FakeFeature("x", FakePosition(0, 1, 1), MEDIA)]))
