"""Which prefill_decode gets one request, and who is next when that one does not take it."""

import asyncio
import time

from triptych_common.protocol.messages import InstanceRecord
from triptych_gateway.gateway import Gateway, unknown_model
from triptych_gateway.openai_errors import unavailable

LOOK_LIMIT_S = 2.0  # beyond the view's own interval


class Choice:
    """For one request. No life of an instance is asked twice; one that was restarted is another life.

    Before it gives up it looks at the registry once more: who just came is not in the view yet.

    Args:
        first: the instance that was chosen before, unless it is leaving meanwhile.
        needs_tower: only instances that can encode the request's media themselves.
    """

    def __init__(
        self,
        gateway: Gateway,
        model: str,
        namespace_digest: str | None,
        first: InstanceRecord | None = None,
        *,
        needs_tower: bool = False,
    ) -> None:
        self._gateway = gateway
        self._model = model
        self._namespace_digest = namespace_digest
        self._first = first
        self._needs_tower = needs_tower
        self._tried: set[tuple[str, str]] = set()  # (instance, boot id)
        self._num_failed = 0
        self._may_look = True

    async def next(self) -> InstanceRecord:
        """The instance to ask now.

        Raises:
            RequestError: there is none (any more).
        """
        record = self._pick()
        if record is None and self._may_look:
            self._may_look = False
            await self._look()
            record = self._pick()
        if record is not None:
            self._tried.add((record.instance, record.boot_id))
            return record
        if self._tried:
            raise unavailable("instance_unreachable", "the serving instance cannot be reached")
        raise unknown_model(self._gateway, self._model)

    def failed(self, record: InstanceRecord) -> None:
        """It could not be reached, or went away: a bounded number of times."""
        self._num_failed += 1
        self._gateway.router.suspect(record.instance, time.monotonic())

    def refused(self) -> None:
        """It is draining, and did nothing: this costs no attempt."""
        self._may_look = True

    def _pick(self) -> InstanceRecord | None:
        gateway, first = self._gateway, self._first
        self._first = None
        records = gateway.view.records
        if first is not None and not any(r.draining for r in records if r.instance == first.instance):
            return first
        if self._num_failed >= gateway.settings.max_dispatch_attempts:
            self._may_look = False
            return None
        return gateway.router.pick(
            records,
            model=self._model,
            namespace_digest=self._namespace_digest,
            exclude={r.instance for r in records if (r.instance, r.boot_id) in self._tried},
            now=time.monotonic(),
            needs_tower=self._needs_tower,
        )

    async def _look(self) -> None:
        interval_s = self._gateway.settings.registry_interval_s
        try:
            async with asyncio.timeout(interval_s + LOOK_LIMIT_S):
                await self._gateway.view.wait_for_look()
        except TimeoutError:
            return  # Redis is away: the last view is all there is
