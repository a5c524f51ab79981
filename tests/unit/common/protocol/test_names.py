import pytest

from triptych_common.protocol.names import StreamNames


def test_every_name_is_distinct_and_inside_the_deployment() -> None:
    names = StreamNames("prod-1")
    all_names = [
        names.encode_jobs("a"),
        names.encode_jobs("b"),
        names.encode_jobs("a", "store-1"),
        names.had_encoder("a"),
        names.metadata("a"),
        names.preallocations("a"),
        names.acks("a"),
        names.encode_results("a"),
        names.dead_letters,
        names.instances,
        names.instance("a"),
        names.sizes,
        names.sizes_order,
        names.item_names("a"),
        names.item_names("b"),
        names.item_names_order("a"),
        names.inflight("a", "a"),
        names.inflight("b", "a"),
    ]
    assert len(set(all_names)) == len(all_names)
    assert all(name.startswith("triptych:prod-1:") for name in all_names)
    assert names.metadata("pd-0") == "triptych:prod-1:metadata:pd-0"


@pytest.mark.parametrize("deployment", ["", "a:b", "a b", "ü", "x" * 101, "a\n"])
def test_bad_deployments_are_refused(deployment: str) -> None:
    with pytest.raises(ValueError, match="deployment name"):
        StreamNames(deployment)
