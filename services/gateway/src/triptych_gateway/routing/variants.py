"""Variants of a model, and the rules of one request for the choice of a variant and its instances. Pure.

Instances of one model differ in their version's label, or in their namespace digest: other weights, another
dtype, another vLLM. A request keeps to one variant, since its items are named with that one's digest.

The conversation picks it by weighted rendezvous hashing, so each variant has its share of the conversations,
a conversation stays where it is, and a variant that comes or goes moves no others.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from urllib.parse import urlsplit

from triptych_common.protocol.messages import InstanceRecord
from triptych_gateway.routing.router import SERVING_ROLES
from triptych_gateway.routing.scheduling.candidates import ServingStage

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class RouteDemand:
    """Routing rules of one request, empty for most."""

    find_session: Callable[[], bytes] = bytes  # called where there is a choice alone
    version: str | None = None  # None: any
    hosts: Mapping[ServingStage, frozenset[str]] = field(default_factory=dict)
    """Addresses `host:port` of instances for a stage, `prefill` or `decode`; both bound a whole request."""

    def allows(self, record: InstanceRecord, stage: ServingStage) -> bool:
        limits = (hosts for of, hosts in self.hosts.items() if stage in (of, ServingStage.WHOLE))
        return all(host_of(record) in hosts for hosts in limits)


ANYWHERE = RouteDemand()


def host_of(record: InstanceRecord) -> str | None:
    """Return `host:port` of the URL that an instance announces, or None."""
    if record.url is None:
        return None
    parts = urlsplit(record.url)
    return join_host(parts.hostname or "", parts.port or _DEFAULT_PORTS.get(parts.scheme, 0))


def join_host(host: str, port: int) -> str:
    """Return `host:port` normalized for comparison: lower case, IPv6 in brackets."""
    return f"[{host.lower()}]:{port}" if ":" in host else f"{host.lower()}:{port}"


_HASH_BYTES = 7  # 53 bits of them make a float below 1 without rounding


class VariantReason(StrEnum):
    ONLY_ONE = "only_one"
    HEADER = "header"  # the request names its version
    SHARE = "share"  # by the operator's weights
    INSTANCES = "instances"  # by how many instances each has
    STORED_RESPONSE = "stored_response"  # which the request goes on from
    LEFT = "left"  # the one before it had no instance any more


@dataclass(frozen=True, slots=True)
class Variant:
    """Variant: instances of one model, one version and one namespace."""

    version: str | None  # None: its instances announce none
    namespace_digest: str | None  # None: they take no media
    instances: frozenset[str]
    encodes: bool = False  # an encoder of the namespace is registered, or an instance has a vision tower
    has_whole: bool = True  # an instance does all of a request; False: there are pairs alone

    @property
    def key(self) -> tuple[str, str]:
        return self.version or "", self.namespace_digest or ""


@dataclass(frozen=True, slots=True)
class RankedVariants:
    """Variants for a request, the first choice first; the others are for when that one has gone."""

    variants: tuple[Variant, ...]
    reason: VariantReason


def variants_of(
    serving: Iterable[InstanceRecord], encoder_namespaces: Set[str], tower_namespaces: Set[str]
) -> tuple[Variant, ...]:
    """Return the sorted variants of instances that serve a model, alone or as halves of pairs."""
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
    """Return the variants that can take a request: for media, if possible, with an encoder now, and for
    undivided requests, if possible, with an instance that does all of it.
    """
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
    """Return `variants` in the order in which one conversation's requests use them.

    Args:
        shares: weights by version; a missing version gets none. None: each instance weighs the same.
    """
    weighted = [(each, _weight(each, variants, shares)) for each in variants]
    scored = [(_score(each, weight, session), each) for each, weight in weighted if weight > 0]
    scored.sort(key=lambda pair: (-pair[0], pair[1].key))
    ranked = tuple(each for _, each in scored)
    if len(ranked) == 1:
        return RankedVariants(ranked, VariantReason.ONLY_ONE)
    return RankedVariants(ranked, VariantReason.INSTANCES if shares is None else VariantReason.SHARE)


def _weight(variant: Variant, variants: Sequence[Variant], shares: Mapping[str, int] | None) -> float:
    """Return a version's weight, shared by its namespaces in proportion to their instances."""
    if shares is None:
        return len(variant.instances)
    whole = sum(len(each.instances) for each in variants if each.version == variant.version)
    return shares.get(variant.version or "", 0) * len(variant.instances) / whole


def _score(variant: Variant, weight: float, session: bytes) -> float:
    """Return a score whose maximum falls on a variant with probability proportional to its weight."""
    digest = blake2b("\0".join(variant.key).encode() + b"\0" + session, digest_size=_HASH_BYTES).digest()
    uniform = ((int.from_bytes(digest, "big") >> 3) + 1) / (2**53 + 1)
    return -weight / math.log(uniform)
