"""Content identity: what makes two media items, or two encoders, the same.

Every part is framed by its length before it is hashed, so that no two different lists of parts can
give the same bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import orjson
from blake3 import blake3

from triptych_common.protocol.ids import MmHash

_NAMESPACE_TAG = b"triptych.namespace.v1"
_ITEM_TAG = b"triptych.item.v2"
_RAW_TAG = b"triptych.raw.v1"
_PIECE_TAG = b"triptych.piece.v1"
_PLAIN_TAG = b"triptych.plain.v1"
_NAME_TAG = b"triptych.name.v1"
_TENANT_CONTEXT = "triptych.tenant.v1"
_CALLER_CONTEXT = "triptych.caller.v1"
_OWNER_CONTEXT = "triptych.owner.v1"


def namespace_digest(parts: Mapping[str, str]) -> str:
    """Return the digest of all that one namespace's engines share (weights, processor, dtype, vLLM version).

    The order of `parts` does not matter. Returns 64 hex digits.
    """
    framed: list[bytes] = []
    for key in sorted(parts):
        framed += (key.encode(), parts[key].encode())
    return _digest(_NAMESPACE_TAG, framed)


def media_digest(media: bytes) -> str:
    """Return the digest of one item's bytes alone, which stands for them in `mm_hash`: 64 hex digits.

    It belongs to no model and no tenant, so it can be kept beside bytes that are asked about later.
    """
    return blake3(media).hexdigest()


def mm_hash(
    *,
    modality: str,
    media_digest: str,
    namespace_digest: str,
    processor_options: Mapping[str, Any],
    media_io_options: Mapping[str, Any],
    tenant_salt: str = "",
    piece_rows: int = 0,
) -> MmHash:
    """Return the identity of a media item: equal if and only if the encoder's output must be equal.

    Args:
        modality: e.g. "image"; the same bytes read as another modality are another item.
        media_digest: from `media_digest`, of the media's bytes as received, not decoded.
        namespace_digest: from `namespace_digest`.
        processor_options: the request's options of the processor (`mm_processor_kwargs`), JSON values.
        media_io_options: the request's options of the media reader (`media_io_kwargs`), JSON values.
        tenant_salt: from `tenant_salt`; keeps tenants from seeing each other's items. "": shared.
        piece_rows: as in the item's `EncodeJob`: how its tensor is divided follows from it. 0: not at all.

    Raises:
        TypeError: an option is not a JSON value.
        ValueError: `media_digest` is not hexadecimal.
    """
    parts = (
        modality.encode(),
        namespace_digest.encode(),
        _canonical(processor_options),
        _canonical(media_io_options),
        tenant_salt.encode(),
        bytes.fromhex(media_digest),
        *([str(piece_rows).encode()] if piece_rows else []),
    )
    return MmHash(_digest(_ITEM_TAG, parts))


def tenant_salt(tenant: str) -> str:
    """Return 64 hex digits that separate the caches of `tenant` from all others'.

    The salt is no secret: callers may not set the fields that contain it.
    """
    return blake3(tenant.encode(), derive_key_context=_TENANT_CONTEXT).hexdigest()


def caller_salt(cache_salt: str) -> str:
    """Return what a caller's own `cache_salt` adds behind the salt of its tenant; "" for none.

    vLLM takes 128 characters at most; `tenant_of_salt` returns the tenant's part.
    """
    if not cache_salt:
        return ""
    return f".{blake3(cache_salt.encode(), derive_key_context=_CALLER_CONTEXT).hexdigest(16)}"


def tenant_of_salt(salt: str) -> str:
    """Return the tenant's part of a salt; "" for a caller without a tenant."""
    return salt.partition(".")[0]


def owner_id(*, tenant: str | None, key_name: str | None, key_digest: str | None) -> str:
    """Return the owner of an API key's files: 32 hex digits that reveal neither key nor tenant.

    A key with a name keeps its files when the key itself is exchanged; one without is known by its digest.
    """
    hasher = blake3(derive_key_context=_OWNER_CONTEXT)
    for part in (tenant, key_name, key_digest):
        framed = b"-" if part is None else b"+" + part.encode()
        hasher.update(len(framed).to_bytes(8, "little"))
        hasher.update(framed)
    return hasher.hexdigest(16)


def item_name(modality: str, uuid: str) -> str:
    """Return the digest of a caller's `uuid` for an item of one modality: 64 hex digits."""
    return _digest(_NAME_TAG, (modality.encode(), uuid.encode()))


def raw_item_id(item: MmHash) -> str:
    """Return the identity of an item's raw media in an engine that encodes it itself, unlike its tensor's."""
    return _digest(_RAW_TAG, (item.encode(),))


def piece_hash(item: MmHash, first_row: int, end_row: int) -> MmHash:
    """Return the identity of the piece of an item's tensor with rows `first_row` up to `end_row`."""
    return MmHash(_digest(_PIECE_TAG, (item.encode(), str(first_row).encode(), str(end_row).encode())))


def entry_hashes(item: MmHash, pieces: Sequence[int]) -> tuple[MmHash, ...]:
    """Return the hashes of an item's entries in a store: its own, or one for each piece of these rows."""
    if not pieces:
        return (item,)
    return tuple(piece_hash(item, first, end) for first, end in row_ranges(pieces))


def row_ranges(pieces: Sequence[int]) -> list[tuple[int, int]]:
    """Return first row and end of each piece, from the number of rows in each."""
    return list(pairwise(accumulate(pieces, initial=0)))


def plain_item_hash(namespace_digest: str, identifier: str) -> MmHash:
    """Return the identity of an item that vLLM named itself, within one namespace."""
    return MmHash(_digest(_PLAIN_TAG, (namespace_digest.encode(), identifier.encode())))


def _canonical(options: Mapping[str, Any]) -> bytes:
    return orjson.dumps(dict(options), option=orjson.OPT_SORT_KEYS)


def _digest(tag: bytes, parts: Iterable[bytes]) -> str:
    hasher = blake3(tag)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()
