"""Variants: the instances of a model that stand for each other, and which variant a request gets. Pure.

Instances of one model differ in their version's label, or in their namespace digest: other weights, another
dtype, another vLLM. A request keeps to one variant, since its items are named with that one's digest.

Which one is drawn by the request's conversation: weighted rendezvous hashing, so each variant has its share
of the conversations, a conversation stays where it is, and one that comes or goes moves no others.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

from triptych_common.protocol.messages import InstanceRecord
from triptych_gateway.routing.router import SERVING_ROLES

_HASH_BYTES = 7  # 53 bits of them make a float below 1 without rounding


class VariantReason(StrEnum):
    """Why a request goes to its variant."""

    ONLY_ONE = "only_one"
    HEADER = "header"  # the request names its version
    SHARE = "share"  # by the operator's weights
    INSTANCES = "instances"  # by how many instances each has
    STORED_RESPONSE = "stored_response"  # which the request goes on from
    LEFT = "left"  # the one before it had no instance any more


@dataclass(frozen=True, slots=True)
class Variant:
    """Instances of one model, one version and one namespace."""

    version: str | None  # None: its instances announce none
    namespace_digest: str | None  # None: they take no media
    instances: frozenset[str]
    encodes: bool = False  # an encoder of the namespace is registered, or an instance has a vision tower
    has_whole: bool = True  # an instance does all of a request; False: there are pairs alone

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from others of its model."""
        return self.version or "", self.namespace_digest or ""


@dataclass(frozen=True, slots=True)
class RankedVariants:
    """That a request may go to, the one that it gets first. The others are for when that one has gone."""

    variants: tuple[Variant, ...]
    reason: VariantReason


def variants_of(
    serving: Iterable[InstanceRecord], encoder_namespaces: Set[str], tower_namespaces: Set[str]
) -> tuple[Variant, ...]:
    """Of the instances that serve a model, by themselves or as halves of pairs; sorted."""
    members: dict[tuple[str | None, str | None], list[InstanceRecord]] = {}
    for record in serving:
        members.setdefault((record.model_version, record.namespace_digest), []).append(record)
    encoding = encoder_namespaces | tower_namespaces
    found = (
        Variant(
            version,
            digest,
            frozenset(each.instance for each in records),
            encodes=digest in encoding,
            has_whole=any(each.role in SERVING_ROLES for each in records),
        )
        for (version, digest), records in members.items()
    )
    return tuple(sorted(found, key=lambda variant: variant.key))


def able_to(
    variants: Sequence[Variant], *, has_media: bool, is_whole_only: bool = False
) -> tuple[Variant, ...]:
    """Those that can take a request. For media those whose items somebody can encode now, if there are any:
    an encoder may come back. For what cannot be divided those with an instance that does all of it, if there
    are any: else it is refused."""
    able = [each for each in variants if each.instances]
    if has_media:
        able = [each for each in able if each.namespace_digest is not None]
        able = [each for each in able if each.encodes] or able
    if is_whole_only:
        able = [each for each in able if each.has_whole] or able
    return tuple(able)


def rank_variants(
    variants: Sequence[Variant], shares: Mapping[str, int] | None, session: bytes
) -> RankedVariants:
    """The order in which one conversation's requests go to `variants`.

    Args:
        shares: weights by version; one that is not there gets nothing. None: each instance weighs the same.
    """
    weighted = [(each, _weight(each, variants, shares)) for each in variants]
    scored = [(_score(each, weight, session), each) for each, weight in weighted if weight > 0]
    scored.sort(key=lambda pair: (-pair[0], pair[1].key))
    ranked = tuple(each for _, each in scored)
    if len(ranked) == 1:
        return RankedVariants(ranked, VariantReason.ONLY_ONE)
    return RankedVariants(ranked, VariantReason.INSTANCES if shares is None else VariantReason.SHARE)


def _weight(variant: Variant, variants: Sequence[Variant], shares: Mapping[str, int] | None) -> float:
    """A version's weight is shared by its namespaces, by their instances."""
    if shares is None:
        return len(variant.instances)
    whole = sum(len(each.instances) for each in variants if each.version == variant.version)
    return shares.get(variant.version or "", 0) * len(variant.instances) / whole


def _score(variant: Variant, weight: float, session: bytes) -> float:
    """The highest score wins with a probability in proportion to its weight."""
    digest = blake2b("\0".join(variant.key).encode() + b"\0" + session, digest_size=_HASH_BYTES).digest()
    uniform = ((int.from_bytes(digest, "big") >> 3) + 1) / (2**53 + 1)
    return -weight / math.log(uniform)
