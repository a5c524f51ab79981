"""Encode of a new file before a request names it, while nothing else is to be encoded.

    waiting --the namespace's encoders have nothing to do--> ordered --> encoded, or failed
       `--a request names it first, it is deleted, or its time is over--> left to requests

One file at a time per gateway, and only while no job stands on the streams of its namespace, nor any of
this gateway's items of that namespace is in flight. So a request finds at most one such encode of each
gateway before its own. No message reports the end of other gateways' jobs, so a gateway polls.

A file that is not encoded ahead is encoded for the first request that names it.
"""

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass
from uuid import uuid4

from triptych_common.domain.errors import BusUnavailableError, RequestError
from triptych_common.domain.fair_queue import FairKey
from triptych_common.protocol.ids import RequestId
from triptych_common.protocol.messages import EncodeClass, InstanceRecord, Modality
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.encode.encode_orders import EncodeOrders
from triptych_gateway.encode.final_acks import FinalAcks
from triptych_gateway.encode.item_wait import ItemWait
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.race import race
from triptych_gateway.request.content_parts import KnownFile, MediaPart
from triptych_gateway.request.media import ItemNaming
from triptych_gateway.routing.registry_view import RegistryView

log = get_logger(__name__)

MAX_WAITING = 1000  # files; the oldest are left to requests
MAX_WAIT_S = 600.0
LOOK_AGAIN_S = 0.25


@dataclass(frozen=True, slots=True)
class _Waiting:
    file: KnownFile
    tenant_salt: str
    until: float  # monotonic seconds


class EncodeAhead:
    """Encoder of files ahead of requests, one per gateway; `run` must run."""

    def __init__(
        self,
        *,
        orders: EncodeOrders,
        final_acks: FinalAcks,
        view: RegistryView,
        metrics: GatewayMetrics,
        timeout_s: float,
        video_piece_rows: int,
    ) -> None:
        """Store its parts; `timeout_s` bounds one encode, `video_piece_rows` is as in `MediaLimits`."""
        self._orders = orders
        self._final_acks = final_acks
        self._view = view
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._video_piece_rows = video_piece_rows
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()  # by file id
        self._added = asyncio.Event()

    def add_file(self, file: KnownFile, tenant_salt: str) -> None:
        """Queue a file for requests with this salt and without options. Never waits."""
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popitem(last=False)
            self._count("late")
        self._waiting[file.file_id] = _Waiting(file, tenant_salt, time.monotonic() + MAX_WAIT_S)
        self._added.set()

    def forget_file(self, file_id: str) -> None:
        """Drop a file that is deleted, or named by a request, which has it encoded."""
        if self._waiting.pop(file_id, None) is not None:
            self._count("left")

    async def run(self) -> None:
        """Encode queued files for ever."""
        while True:
            self._added.clear()
            if not self._waiting:
                await self._added.wait()
                continue
            file_id, waiting = next(iter(self._waiting.items()))
            try:
                await self._serve(waiting)
            except Exception:  # one bad file must not stop the others
                log.exception("encode-ahead failed", file_id=file_id)
                self._count("failed")
            finally:
                self._waiting.pop(file_id, None)

    async def _serve(self, waiting: _Waiting) -> None:
        file_id, targets = waiting.file.file_id, self._targets(waiting.file)
        if not targets:
            self._count("no_encoder")
        for record, digest, modality in targets:
            while not await self._is_idle(digest):
                if digest == targets[0][1] and file_id not in self._waiting:
                    return  # a request has it encoded, or it is deleted; counted. The next one's turn
                if time.monotonic() >= waiting.until:
                    self._count("late")
                    return
                await asyncio.sleep(LOOK_AGAIN_S)
            if self._waiting.pop(file_id, None) is None and targets[0][1] == digest:
                return  # a request has it encoded; counted
            self._count(await self._encode(waiting, record, digest, modality))

    def _targets(self, file: KnownFile) -> list[tuple[InstanceRecord, str, Modality]]:
        """Return (instance that items are announced to, its namespace, the file's modality there)."""
        found: dict[str, tuple[InstanceRecord, str, Modality]] = {}
        variants = [(each, model) for model in self._view.models for each in self._view.variants_of(model)]
        for variant, model in variants:
            digest = variant.namespace_digest
            if digest is None or digest in found or not self._view.has_encoder(digest):
                continue
            limits = self._view.item_limits(digest)
            kinds = [each for each in file.modalities if not limits or limits.get(each, 0)]
            records = [each for each in self._view.instances_of(model) if each.namespace_digest == digest]
            if kinds and records:
                found[digest] = (records[0], digest, kinds[0])
        return list(found.values())

    async def _is_idle(self, digest: str) -> bool:
        own = (item for item in self._orders.table if self._orders.namespace_of(item) == digest)
        if any(item.in_flight for item in own):
            return False
        try:
            backlog = await self._orders.flight_requests.read_backlog(digest)
        except BusUnavailableError:
            return False
        return not backlog.num_jobs

    async def _encode(
        self, waiting: _Waiting, record: InstanceRecord, digest: str, modality: Modality
    ) -> str:
        file = waiting.file
        part = MediaPart(0, (), modality, "", "file", file_id=file.file_id, file=file)
        item = ItemNaming(digest, self._video_piece_rows, waiting.tenant_salt).name_file(part, file)
        item_wait = ItemWait(
            RequestId(f"ahead-{uuid4().hex}"),
            record.instance,
            (item,),
            time.monotonic() + self._timeout_s,
            None,
            digest,
            fair_key=FairKey(EncodeClass.AHEAD),
        )
        try:
            # The instance that the item is announced to never gets a request: the gateway acks in its place.
            async with self._final_acks.hold_acks(item_wait), self._orders.open_wait(item_wait):
                self._orders.order_all(item_wait)
                async with asyncio.timeout(self._timeout_s):
                    await race(item_wait.wait_sealed(), item_wait.wait_failure())
        except TimeoutError:
            log.warning("file not encoded ahead", file_id=file.file_id, code="deadline_exceeded")
            return "failed"
        except RequestError as error:
            log.warning("file not encoded ahead", file_id=file.file_id, code=error.code)
            return "failed"
        return "encoded"

    def _count(self, outcome: str) -> None:
        self._metrics.files_encoded_ahead.labels(outcome).inc()
