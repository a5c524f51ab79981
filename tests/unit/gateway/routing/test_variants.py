"""Variants: instances that stand for each other; shares of conversations, which stay where they are."""

from collections import Counter

import pytest

from tests.support.message_samples import instance_record
from triptych_common.protocol.messages import InstanceRecord, Role
from triptych_gateway.routing.variants import Variant, VariantReason, able_to, rank_variants, variants_of

X, Y = "1" * 64, "2" * 64  # digests of namespaces
NUM_CONVERSATIONS = 4000


def pd(name: str, version: str | None = None, digest: str | None = X) -> InstanceRecord:
    return instance_record(
        name, Role.PREFILL_DECODE, model="m", namespace_digest=digest, model_version=version
    )


def variant(version: str, *instances: str, digest: str = X, encodes: bool = True) -> Variant:
    return Variant(version, digest, frozenset(instances), encodes)


def counts(variants: list[Variant], shares: dict[str, int] | None) -> Counter[str]:
    """First choices of many conversations, by version."""
    ranked = (rank_variants(variants, shares, str(n).encode()) for n in range(NUM_CONVERSATIONS))
    return Counter(each.variants[0].version or "" for each in ranked)


def test_by_version_and_namespace() -> None:
    records = [pd("a"), pd("b"), pd("c", "2"), pd("d", "2", Y), pd("e", None, None)]
    found = {each.key: each for each in variants_of(records, frozenset({Y}), frozenset())}
    assert {key: set(each.instances) for key, each in found.items()} == {
        ("", X): {"a", "b"},
        ("2", X): {"c"},
        ("2", Y): {"d"},
        ("", ""): {"e"},
    }
    assert {key for key, each in found.items() if each.encodes} == {("2", Y)}
    assert all(each.encodes for each in variants_of(records[:3], frozenset(), frozenset({X})))


def test_media_go_where_they_can_be_encoded_now_if_that_is_anywhere() -> None:
    with_encoder, without = variant("1", "a"), variant("2", "b", digest=Y, encodes=False)
    text = Variant("3", None, frozenset({"c"}))
    gone = variant("4")
    assert able_to([with_encoder, without, text, gone], has_media=True) == (with_encoder,)
    assert able_to([without, text], has_media=True) == (without,)
    assert able_to([with_encoder, without, text, gone], has_media=False) == (with_encoder, without, text)


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        (None, {"1": 0.75, "2": 0.25}),  # by their instances
        ({"1": 50, "2": 50}, {"1": 0.5, "2": 0.5}),
        ({"1": 9, "2": 1}, {"1": 0.9, "2": 0.1}),
        ({"1": 0, "2": 1}, {"2": 1.0}),
        ({"2": 1, "3": 99}, {"2": 1.0}),  # the third has no instance
    ],
)
def test_each_gets_its_share(shares: dict[str, int] | None, expected: dict[str, float]) -> None:
    """Within four times the standard error."""
    found = counts([variant("1", "a", "b", "c"), variant("2", "d", digest=Y)], shares)
    assert found.keys() == expected.keys()
    for version, share in expected.items():
        error = 4 * (share * (1 - share) / NUM_CONVERSATIONS) ** 0.5
        assert found[version] / NUM_CONVERSATIONS == pytest.approx(share, abs=error), found


def test_namespaces_of_one_version_divide_its_share_by_their_instances() -> None:
    variants = [variant("1", "a"), variant("2", "b", "c"), variant("2", "d", "e", digest=Y)]
    assert counts(variants, {"1": 1, "2": 1})["1"] / NUM_CONVERSATIONS == pytest.approx(0.5, abs=0.04)


def test_a_conversation_stays_and_moves_only_when_its_version_has_gone() -> None:
    three = [variant("1", "a"), variant("2", "b"), variant("3", "c")]
    shares = {"1": 1, "2": 1, "3": 1}
    for number in range(200):
        conversation = str(number).encode()
        ranked = rank_variants(three, shares, conversation)
        assert ranked.reason is VariantReason.SHARE
        assert rank_variants(three[::-1], shares, conversation) == ranked
        first, second, _ = ranked.variants
        left = [each for each in three if each is not first]
        assert rank_variants(left, shares, conversation).variants[0] is second
        more = [*three, variant("4", "d")]
        assert rank_variants(more, {**shares, "4": 1}, conversation).variants[0] in (first, more[-1])


def test_why() -> None:
    one, two = variant("1", "a"), variant("2", "b")
    assert rank_variants([one, two], None, b"").reason is VariantReason.INSTANCES
    assert rank_variants([one], None, b"").reason is VariantReason.ONLY_ONE
    assert rank_variants([one, two], {"1": 1}, b"").variants == (one,)
    assert rank_variants([one, two], {"3": 1}, b"").variants == ()
