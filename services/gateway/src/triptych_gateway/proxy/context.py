"""RequestContext: facts that all steps of a request share; UpstreamRequest: what is sent of it. Frozen."""

from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from triptych_common.protocol.ids import RequestId
from triptych_common.protocol.messages import EncodeClass, InstanceRecord, Modality
from triptych_gateway.access.auth import Caller
from triptych_gateway.access.key_limiter import RequestCharge
from triptych_gateway.access.key_limits import PRIORITY_FIELD
from triptych_gateway.decision.prediction import CostEstimate
from triptych_gateway.encode.item_wait import ItemWait
from triptych_gateway.endpoints.endpoint import Endpoint
from triptych_gateway.endpoints.table import CHAT
from triptych_gateway.proxy.audio_request import AudioRequest
from triptych_gateway.request.chat_request import ChatRequest
from triptych_gateway.request.media import TakenItem
from triptych_gateway.request.text_request import TextRequest
from triptych_gateway.routing.instances import InstanceLosses
from triptych_gateway.routing.scheduling.candidates import RoutingRequest
from triptych_gateway.routing.variants import ANYWHERE, RouteDemand, Variant, VariantReason
from triptych_gateway.tracing.request_span import RequestSpan


@dataclass(frozen=True, slots=True)
class PriorResponse:
    """Stored response that a request continues; one instance has it."""

    record: InstanceRecord
    has_raw_media: bool  # it keeps media as data URLs: further ones are sent alike


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Identity, caller, deadlines and routing rules of one request. A new one is made for another variant."""

    request_id: RequestId
    caller: Caller
    root: RequestSpan
    at: float  # monotonic seconds
    first_token_deadline: float  # monotonic seconds; whole answers are bound by the request's own limit
    charge: RequestCharge | None = None  # None: the caller's key has no limits
    prior: PriorResponse | None = None  # None: any instance will do
    on_answer: Callable[[Any, InstanceRecord], Awaitable[None]] | None = None
    """Awaited with the upstream request when an answer has begun, before any of it is sent."""
    encode_header: str | None = None  # as sent: whose encode its media shall get
    priority: int = 0  # lower is earlier; of the caller's key, or a later one that the request asked for
    session: str = ""  # caller's name of the conversation; "": none
    demand: RouteDemand = ANYWHERE
    variant: Variant | None = None  # variant that its media are named for; None: it has no media
    variant_reason: VariantReason | None = None
    left: frozenset[tuple[str, str]] = frozenset()  # keys of the variants that it has left
    losses: InstanceLosses = field(default_factory=InstanceLosses)

    @property
    def namespace_digest(self) -> str:
        """Digest of the namespace that the request's media are named for."""
        if self.variant is None or self.variant.namespace_digest is None:
            raise ValueError("media go to instances of a namespace alone")
        return self.variant.namespace_digest

    def moved_to(self, variant: Variant) -> "RequestContext":
        """Return the context for a new start at `variant`, without return to the one before."""
        left = self.left if self.variant is None else self.left | {self.variant.key}
        return replace(self, variant=variant, variant_reason=VariantReason.LEFT, left=left)


def encode_class_of(context: RequestContext, body: Mapping[str, Any]) -> EncodeClass:
    """Return `batch` if the key's priority or the request asks for it; any request may take a later turn."""
    asked = body.get(PRIORITY_FIELD)
    is_later = context.priority > 0 or (isinstance(asked, int) and not isinstance(asked, bool) and asked > 0)
    return EncodeClass.BATCH if is_later else EncodeClass.INTERACTIVE


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    context: RequestContext
    request: ChatRequest | AudioRequest | TextRequest
    body: bytes
    namespace_digest: str | None = None  # None: text only, any namespace
    needs_tower: bool = False  # the media are sent raw
    takes: Set[Modality] = frozenset()  # to an instance that takes such raw items beside the request's media
    item_wait: ItemWait | None = None  # the media are sent as metadata
    items: Sequence[TakenItem] = ()  # the request's media, however they are sent
    first_choice: InstanceRecord | None = None
    estimate: CostEstimate | None = None  # None: no media
    endpoint: Endpoint = CHAT
    path: str | None = None  # with a query, if there is one; None: the endpoint's
    content_type: str = "application/json"
    routing: RoutingRequest | None = None  # facts for the choice of an instance; None: its load alone
