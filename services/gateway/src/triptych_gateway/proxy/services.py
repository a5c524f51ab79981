"""Services: parts that all requests of a gateway share, grouped by owner. Frozen."""

from concurrent.futures import Executor
from dataclasses import dataclass, field

from aiohttp import ClientSession

from triptych_common.telemetry import get_logger
from triptych_common.telemetry.logs import LimitedLog
from triptych_gateway.access.auth import ApiKeys
from triptych_gateway.access.key_limiter import KeyLimiter
from triptych_gateway.access.request_limiter import RequestLimiter
from triptych_gateway.decision.encode_decisions import EncodeDecisions
from triptych_gateway.encode.encode_orders import EncodeOrders
from triptych_gateway.encode.final_acks import FinalAcks
from triptych_gateway.files.file_service import FileService
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.proxy.forward import Forwarder
from triptych_gateway.proxy.routing import RoutingHeaders
from triptych_gateway.race import CutOff
from triptych_gateway.request.chat_request import RequestParser
from triptych_gateway.request.media import MediaIntake
from triptych_gateway.routing.instances import Instances
from triptych_gateway.settings import GatewaySettings
from triptych_gateway.tracing.recent_requests import RecentRequests
from triptych_gateway.tracing.trace_trust import TraceTrust
from triptych_gateway.transfers.transfer_orders import TransferOrders


@dataclass(frozen=True, slots=True)
class AccessServices:
    """Checks that every request passes before it is read, and those that count it."""

    trace_trust: TraceTrust
    routing_headers: RoutingHeaders
    api_keys: ApiKeys
    limiter: RequestLimiter
    key_limiter: KeyLimiter


@dataclass(frozen=True, slots=True)
class MediaServices:
    """Owners of media, of their encodes and of the stores that have them."""

    files: FileService | None  # None: none are kept
    intake: MediaIntake
    orders: EncodeOrders
    decisions: EncodeDecisions
    final_acks: FinalAcks
    transfers: TransferOrders


@dataclass(frozen=True, slots=True)
class Services:
    """Parts that all requests share; limits are read from the settings where they apply."""

    settings: GatewaySettings
    metrics: GatewayMetrics
    access: AccessServices
    parser: RequestParser
    media: MediaServices
    instances: Instances
    forwarder: Forwarder
    http: ClientSession
    threads: Executor  # for bodies
    recents: RecentRequests | None = None  # None: the page at `/ui` is off
    cut_off: CutOff = field(default_factory=CutOff)  # ends requests when the time to drain is over
    refusals: LimitedLog = field(default_factory=lambda: LimitedLog(get_logger("triptych_gateway.proxy")))
