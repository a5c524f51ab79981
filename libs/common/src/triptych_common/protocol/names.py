"""Names of streams, groups and keys in Redis. All start with `triptych:<deployment>:`.

A part in braces is a hash tag: on Redis Cluster keys with the same tag are on the same server, as a script of
several keys needs. Keys without one are read and written one by one.
"""

import re
from dataclasses import dataclass

ENCODERS_GROUP = "encoders"
"""Consumer group of an `encode-jobs` stream: whichever of its encoders is free takes the next job."""

DEFAULT_STORE = "store-0"
"""The name of a cache_store that was given none, and the store of an encoder that names none.

`./triptych` and Compose name the store of a host that is alone `cache_store-0`."""

OWNER_GROUP = "owner"
"""Consumer group of a stream that only one instance reads."""

INBOX_TTL_S = 300
"""An inbox is gone this long after its owner's last heartbeat and the last message to it."""

JOBS_TTL_S = 300
"""A stream of jobs is gone this long after its encoders' last heartbeat or its first job, but not while a
requester may still wait for one of them."""

_DEPLOYMENT = re.compile(r"[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True)
class StreamNames:
    """Names inside one deployment; deployments share a Redis without seeing each other.

    Raises:
        ValueError: `deployment` is empty, too long, or holds other characters than letters, digits, `._-`.
    """

    deployment: str

    def __post_init__(self) -> None:
        if _DEPLOYMENT.fullmatch(self.deployment) is None:
            raise ValueError(f"deployment name {self.deployment!r} must match {_DEPLOYMENT.pattern}")

    def _key(self, *parts: str) -> str:
        return ":".join(("triptych", self.deployment, *parts))

    def _tagged(self, kind: str, tag: str, *parts: str) -> str:
        return self._key(kind, f"{{{tag}}}", *parts)

    # ---- streams ----
    def encode_jobs(self, namespace_digest: str, store: str = DEFAULT_STORE) -> str:
        """Stream from gateways to one namespace's encoders at `store`, group `ENCODERS_GROUP`."""
        return self._tagged("encode-jobs", namespace_digest, store)

    def metadata(self, instance: str) -> str:
        """Stream from encoders to one prefill_decode instance."""
        return self._key("metadata", instance)

    def preallocations(self, instance: str) -> str:
        """Stream from prefill_decode instances to one encoder: requests to reserve."""
        return self._key("preallocations", instance)

    def acks(self, instance: str) -> str:
        """Stream from prefill_decode instances to one encoder: final acks."""
        return self._key("acks", instance)

    def encode_results(self, instance: str) -> str:
        """Stream from encoders and prefill_decode instances to one gateway."""
        return self._key("encode-results", instance)

    def transfers(self, instance: str) -> str:
        """Stream from gateways to one fabric agent."""
        return self._key("transfers", instance)

    @property
    def dead_letters(self) -> str:
        """Entries that no consumer could handle, with the reason."""
        return self._key("dead-letters")

    # ---- keys ----
    @property
    def instances(self) -> str:
        """Sorted set of instance names by their last heartbeat (seconds, wall clock of their machine)."""
        return self._key("{instance}s")

    def instance(self, instance: str) -> str:
        """Key of one `InstanceRecord`; expires when its heartbeats stop."""
        return self._key("{instance}", instance)

    def tensor(self, place: str) -> str:
        """Key of one tensor's bytes, transport `redis`; `place` is its mm_hash, generation and offset."""
        return self._key("tensor", place)

    @property
    def sizes(self) -> str:
        """Hash: placeholder sizes of items that were encoded before, by mm_hash (its 32 bytes)."""
        return self._key("{sizes}")

    @property
    def sizes_order(self) -> str:
        """List: the mm_hashes of `sizes`, oldest first."""
        return self._key("{sizes}-order")

    def inflight(self, namespace_digest: str, mm_hash: str) -> str:
        """Key of an item's flight: its encoder, and the requesters that wait for it."""
        return self._tagged("inflight", namespace_digest, mm_hash)

    def had_encoder(self, namespace_digest: str) -> str:
        """Key of the store of a namespace's encoder, until `JOBS_TTL_S` after their last heartbeat."""
        return self._tagged("had-encoder", namespace_digest)

    @property
    def entries(self) -> str:
        """Hash: stores that have an entry, by its mm_hash (its 32 bytes). A hint: it may be evicted."""
        return self._key("{entries}")

    @property
    def entries_order(self) -> str:
        """List: the mm_hashes of `entries`, oldest first."""
        return self._key("{entries}-order")

    def response(self, response_id: str) -> str:
        """Key of a stored response's instance, owner and media; expires."""
        return self._key("response", response_id)

    def item_names(self, owner: str) -> str:
        """Hash: items that `owner` named by a `uuid`, by a digest of it (32 bytes); expires."""
        return self._tagged("item-names", owner)

    def item_names_order(self, owner: str) -> str:
        """List: the digests of `item_names`, oldest first."""
        return self._tagged("item-names-order", owner)

    def limit_levels(self, api_key_name: str) -> str:
        """Hash of an API key's used part of each rate per minute, by rate."""
        return self._tagged("limit-levels", api_key_name)

    def limit_places(self, api_key_name: str) -> str:
        """Hash of an API key's requests in flight, with the end of each lease."""
        return self._tagged("limit-places", api_key_name)


def everything(names: StreamNames) -> str:
    """Return a pattern of all keys that a deployment has in Redis."""
    return names.dead_letters.removesuffix("dead-letters") + "*"


def inboxes(names: StreamNames, instance: str) -> tuple[str, ...]:
    """Return every stream that `instance` alone may read, whatever its role."""
    return (
        names.metadata(instance),
        names.preallocations(instance),
        names.acks(instance),
        names.encode_results(instance),
        names.transfers(instance),
    )


def is_jobs(names: StreamNames, stream: str) -> bool:
    """Return whether `stream` holds encode jobs, so that it must expire with its encoders and jobs."""
    return stream.startswith(everything(names).removesuffix("*") + "encode-jobs:")


def is_inbox(names: StreamNames, stream: str) -> bool:
    """Return whether `stream` belongs to one instance, so that it must expire with its owner."""
    return stream.startswith(inboxes(names, ""))
