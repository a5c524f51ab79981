"""State in Redis keys that services agree on, apart from streams.

single_flight   which encoder works on an item, and which requests wait for it, over all gateways
registry        which instances are alive
entry_directory  which stores have an entry, where there are several
tensor_blobs    bytes of tensors, for the transport `redis`
request_counts  requests of an API key, counted against its limits
item_names      which item a caller's `uuid` stands for
stored_responses  which instance has a stored response, and what its conversation needs
"""

from triptych_common.coordination.entry_directory import EntryDirectory, NotedPlace, SharedSizes
from triptych_common.coordination.item_names import ItemNames
from triptych_common.coordination.registry import Registration, Registry, is_registered, store_of
from triptych_common.coordination.request_counts import CountResult, RateCharge, RequestCounts
from triptych_common.coordination.single_flight import (
    Backlog,
    Backlogs,
    ClaimResult,
    FlightClaim,
    JobOffer,
    SingleFlight,
    StartResult,
    merge_backlogs,
)
from triptych_common.coordination.stored_responses import StoredResponses
from triptych_common.coordination.tensor_blobs import BlobMissingError, BlobStore

__all__ = [
    "Backlog",
    "Backlogs",
    "BlobMissingError",
    "BlobStore",
    "ClaimResult",
    "CountResult",
    "EntryDirectory",
    "FlightClaim",
    "ItemNames",
    "JobOffer",
    "NotedPlace",
    "RateCharge",
    "Registration",
    "Registry",
    "RequestCounts",
    "SharedSizes",
    "SingleFlight",
    "StartResult",
    "StoredResponses",
    "is_registered",
    "merge_backlogs",
    "store_of",
]
