"""Request to send to an instance, and the instances that may get it."""

from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from triptych_common.protocol.ids import RequestId
from triptych_common.protocol.messages import EncodeClass, InstanceRecord, Modality
from triptych_gateway.access.callers import Caller
from triptych_gateway.access.key_limiter import RequestCharge
from triptych_gateway.access.key_limits import PRIORITY_FIELD
from triptych_gateway.chat.sound_request import SoundRequest
from triptych_gateway.decision.courses import Course
from triptych_gateway.encode.media_wait import MediaWait
from triptych_gateway.endpoints.endpoint import Endpoint
from triptych_gateway.endpoints.table import CHAT
from triptych_gateway.request.chat_request import ChatRequest
from triptych_gateway.request.text_request import TextRequest
from triptych_gateway.routing.instances import InstanceLosses
from triptych_gateway.routing.route_demand import ANYWHERE, RouteDemand
from triptych_gateway.routing.scheduling.candidates import RoutingRequest
from triptych_gateway.routing.variants import Variant, VariantReason
from triptych_gateway.tracing.request_span import RequestSpan


@dataclass(frozen=True, slots=True)
class PriorResponse:
    """Stored response that a request continues; one instance has it."""

    record: InstanceRecord
    has_raw_media: bool  # it keeps media as data URLs: further ones are sent alike


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request as it arrived: its caller, times, headers and span."""

    request_id: RequestId
    caller: Caller
    root: RequestSpan
    at: float  # monotonic seconds
    first_token_deadline: float  # monotonic seconds; whole answers are bound by the request's own limit
    charge: RequestCharge | None = None  # None: the caller's key has no limits
    prior: PriorResponse | None = None  # None: any instance will do
    on_answer: "OnAnswer | None" = None  # awaited when an answer has begun, before any of it is sent
    encode_header: str | None = None  # as sent: whose encode its media shall get
    priority: int = 0  # lower is earlier; of the caller's key, or a later one that the request asked for
    session: str = ""  # caller's name of the conversation; "": none
    demand: RouteDemand = ANYWHERE
    variant: Variant | None = None  # variant that its media are named for; None: it has no media
    variant_reason: VariantReason | None = None
    left: frozenset[tuple[str, str]] = frozenset()  # keys of the variants that it has left
    losses: InstanceLosses = field(default_factory=InstanceLosses)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Upstream request, and the instances that may get it."""

    arrival: Arrival
    request: ChatRequest | SoundRequest | TextRequest
    body: bytes
    namespace_digest: str | None = None  # None: text only, any namespace
    needs_tower: bool = False  # the media are sent raw
    takes: Set[Modality] = frozenset()  # to an instance that takes such raw items beside the request's media
    media_wait: MediaWait | None = None  # the media are sent as metadata
    first_choice: InstanceRecord | None = None
    course: Course | None = None  # None: no media
    endpoint: Endpoint = CHAT
    path: str | None = None  # with a query, if there is one; None: the endpoint's
    content_type: str = "application/json"
    routing: RoutingRequest | None = None  # facts for the choice of an instance; None: its load alone


def encode_class_of(arrival: Arrival, body: Mapping[str, Any]) -> EncodeClass:
    """Return `batch` if the key's priority or the request asks for it; any request may take a later turn."""
    asked = body.get(PRIORITY_FIELD)
    is_later = arrival.priority > 0 or (isinstance(asked, int) and not isinstance(asked, bool) and asked > 0)
    return EncodeClass.BATCH if is_later else EncodeClass.INTERACTIVE


OnAnswer = Callable[[Dispatch, InstanceRecord], Awaitable[None]]
