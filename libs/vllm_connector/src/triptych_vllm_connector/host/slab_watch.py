"""What an instance announces of its transports, kept true over restarts of the store. In the host.

`cuda_ipc` is announced for one start of one store, after the worker has mapped that store's slab and copied
from it. When the store was restarted the worker is asked again; until then nobody uses the new slab, because
what was announced is of the old one. Where the slab failed, the worker is asked again from time to time.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from triptych_common.coordination import Registration
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.domain.transports import TransportCapabilities
from triptych_common.protocol.store import Welcome
from triptych_common.store_session import AsyncStoreSession
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.config import STORE_RECONNECT_S, TransportSetting
from triptych_vllm_connector.host.transport_capabilities import (
    MAX_FAILURE_CHARS,
    NO_GPU,
    SlabVerdict,
    TransportError,
    ability,
)

log = get_logger(__name__)

Ask = Callable[[], Awaitable[dict[str, Any]]]
"""EngineCore's `triptych_probe_slab`: fields of a `SlabVerdict`."""

SLAB_SESSION = "slab"
ANSWER_LIMIT_S = 30.0  # a step of the engine comes first, and the worker's own way back to the store
RETRY_S = 0.1
FIRST_LOOK_AGAIN_S = 30.0  # at a slab that failed; then twice as long each time
LONGEST_LOOK_AGAIN_S = 300.0


class StoreChanges:
    """What has become of a session with the store."""

    def __init__(self) -> None:
        self.happened = asyncio.Event()
        self.is_over = False

    def on_reconnect(self, welcome: Welcome) -> None:
        self.happened.set()

    def on_disconnect(self, error: Exception | None) -> None:
        self.is_over = True
        self.happened.set()


class SlabWatch:
    """`own` is what the instance offers now; `run` publishes its changes."""

    def __init__(
        self,
        setting: TransportSetting,
        has_region: bool,
        session: AsyncStoreSession | None = None,
        ask: Ask | None = None,
        changes: "StoreChanges | None" = None,
    ) -> None:
        self._setting = setting
        self._has_region = has_region
        self._session = session
        self._ask = ask
        self._changes = changes or StoreChanges()
        self._verdict = NO_GPU
        self.own: TransportCapabilities

    @classmethod
    @asynccontextmanager
    async def open(
        cls, socket: Path, instance: str, setting: TransportSetting, *, has_region: bool, ask: Ask | None
    ) -> "AsyncIterator[SlabWatch]":
        """`ask` None: the engine has no GPU of its own.

        Raises:
            TransportError: `setting` asks for what cannot be had here.
            StoreError: there is no store, or it refuses us.
        """
        if ask is None or setting not in ("auto", "cuda_ipc"):
            watch = cls(setting, has_region)
            watch.own = ability(setting, slab=NO_GPU, has_region=has_region)
            yield watch
            return
        changes = StoreChanges()
        session = await AsyncStoreSession.connect(
            socket,
            f"{instance}/{SLAB_SESSION}",
            on_reconnect=changes.on_reconnect,
            on_disconnect=changes.on_disconnect,
            reconnect_timeout_s=STORE_RECONNECT_S,
        )
        async with session:
            watch = cls(setting, has_region, session, ask, changes)
            await watch._look()
            watch.own = ability(setting, slab=watch._verdict, has_region=has_region)
            yield watch

    @property
    def slab_failure(self) -> str | None:
        """Why the slab that the store has cannot be used; None: it can, or there is none."""
        has_slab = self._session is not None and self._session.welcome.slab is not None
        return self._verdict.failure if has_slab else None

    def fields(self) -> dict[str, Any]:
        """Of the instance's record."""
        return {
            "transports": self.own.transports,
            "device": self.own.device,
            "slab_generation": self.own.slab_generation,
            "slab_failure": self.slab_failure,
        }

    async def run(self, registration: Registration) -> None:
        """Until cancelled, or nothing can change any more."""
        look_again_s = FIRST_LOOK_AGAIN_S
        while self._session is not None and not self._changes.is_over:
            before = self.fields()
            if await self._store_changed(look_again_s if self.slab_failure is not None else None):
                look_again_s = FIRST_LOOK_AGAIN_S
            else:
                look_again_s = min(2 * look_again_s, LONGEST_LOOK_AGAIN_S)
            await self._look()
            try:
                self.own = ability(self._setting, slab=self._verdict, has_region=self._has_region)
            except TransportError:  # an instance that works goes on with what it can do
                self.own = ability("auto", slab=self._verdict, has_region=self._has_region)
            if self.fields() == before:
                continue
            try:
                await registration.update(**self.fields())
            except BusUnavailableError as error:
                log.warning("transports are announced later", error=str(error))

    async def _store_changed(self, timeout_s: float | None) -> bool:
        """Waits for a change of the store; False: none came in `timeout_s`. None: waits for ever."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changes.happened.wait()
        except TimeoutError:
            return False
        self._changes.happened.clear()
        return True

    async def _look(self) -> None:
        if self._session is None or self._ask is None:
            return
        before = self._verdict
        device = before.device
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                self._verdict = await self._answer(self._session, self._ask)
        except TimeoutError:
            self._verdict = SlabVerdict(device, failure="the worker did not answer in time")
        except Exception as error:  # whatever vLLM makes of a call: the engine's health is looked at apart
            self._verdict = SlabVerdict(device, failure=str(error)[:MAX_FAILURE_CHARS])
            if self._verdict != before:
                log.exception("worker not asked for the slab")
        if self._verdict == before:
            return
        if self.slab_failure is not None:
            log.warning("cuda_ipc cannot be used", failure=self.slab_failure)
        elif self._verdict.usable_generation is not None:
            log.info("cuda_ipc can be used", device=self._verdict.device)

    async def _answer(self, session: AsyncStoreSession, ask: Ask) -> SlabVerdict:
        """The worker's, of the store as we know it: its own session may come back later than ours."""
        while not self._changes.is_over:
            verdict = SlabVerdict(**await ask())
            if verdict.generation == session.welcome.generation:
                return verdict
            await asyncio.sleep(RETRY_S)
        return SlabVerdict(failure="the session with the store has ended")
