"""Announces the host's transport capabilities, and again when the store restarts.

`cuda_ipc` is announced for one start of one store, after the worker has mapped that store's slab and copied
from it. After a restart of the store the worker probes again; until then no producer uses the new slab,
because the announcement is of the old one. A slab that failed is probed again periodically.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from triptych_common.coordination import Registration
from triptych_common.domain.errors import BusUnavailableError, TriptychError
from triptych_common.domain.transports import TransportCapabilities
from triptych_common.protocol.messages import Transport
from triptych_common.protocol.store import Welcome
from triptych_common.store_session import AsyncStoreSession
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.config import STORE_RECONNECT_S, TransportSetting
from triptych_vllm_connector.slab_probe import MAX_FAILURE_CHARS, NO_GPU, SlabProbeResult

log = get_logger(__name__)

BEST_FIRST = (Transport.CUDA_IPC, Transport.PINNED_SHM, Transport.REDIS)
ProbeSlab = Callable[[], Awaitable[dict[str, Any]]]
"""EngineCore's `triptych_probe_slab`: fields of a `SlabProbeResult`."""

SLAB_SESSION = "slab"
PROBE_LIMIT_S = 30.0  # a step of the engine comes first, and the worker's own way back to the store
RETRY_S = 0.1
FIRST_REPROBE_S = 30.0  # of a slab that failed; then twice as long each time
LONGEST_REPROBE_S = 300.0


class TransportError(TriptychError):
    """The configured transport cannot be used here."""


def announced_capabilities(
    setting: TransportSetting, *, slab: SlabProbeResult, has_region: bool
) -> TransportCapabilities:
    """Transports that this instance offers.

    `slab` is the worker's probe; `has_region` is true if the store's region can be mapped here.

    Raises:
        TransportError: `setting` asks for what this machine does not have.
    """
    possible = {
        Transport.CUDA_IPC: slab.usable_generation is not None,
        Transport.PINNED_SHM: has_region,
        Transport.REDIS: True,
    }
    asked_for = BEST_FIRST if setting == "auto" else (Transport(setting),)
    transports = tuple(each for each in asked_for if possible[each])
    if not transports:
        lacking = slab.failure if setting == "cuda_ipc" else "the region cannot be mapped"
        raise TransportError(f"transport {setting} cannot be used here: {lacking}")
    return TransportCapabilities(transports, slab.device, slab.usable_generation)


class StoreChanges:
    def __init__(self) -> None:
        self.happened = asyncio.Event()
        self.is_over = False

    def on_reconnect(self, welcome: Welcome) -> None:
        self.happened.set()

    def on_disconnect(self, error: Exception | None) -> None:
        self.is_over = True
        self.happened.set()


class SlabProber:
    """Asks the worker to probe the slab of this session's store; `result` is of the last probe."""

    def __init__(self, session: AsyncStoreSession, probe_slab: ProbeSlab, changes: StoreChanges) -> None:
        self._session = session
        self._probe_slab = probe_slab
        self._changes = changes
        self.result = NO_GPU

    @property
    def is_over(self) -> bool:
        """True if the session has ended and nothing can change any more."""
        return self._changes.is_over

    @property
    def failure(self) -> str | None:
        """Reason why the store's slab cannot be used; None if it can, or there is none."""
        return None if self._session.welcome.slab is None else self.result.failure

    async def wait_for_change(self, timeout_s: float | None) -> bool:
        """True if the store changed within `timeout_s`; None waits for ever."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changes.happened.wait()
        except TimeoutError:
            return False
        self._changes.happened.clear()
        return True

    async def probe(self) -> None:
        """Probe once; a failure is a result."""
        before = self.result
        try:
            async with asyncio.timeout(PROBE_LIMIT_S):
                self.result = await self._probe_this_store()
        except TimeoutError:
            self.result = SlabProbeResult(before.device, failure="the worker did not answer in time")
        except Exception as error:  # whatever vLLM makes of a call: the engine's health is checked apart
            self.result = SlabProbeResult(before.device, failure=str(error)[:MAX_FAILURE_CHARS])
            if self.result != before:
                log.exception("slab probe failed")
        if self.result == before:
            return
        if self.failure is not None:
            log.warning("cuda_ipc cannot be used", failure=self.failure)
        elif self.result.usable_generation is not None:
            log.info("cuda_ipc can be used", device=self.result.device)

    async def _probe_this_store(self) -> SlabProbeResult:
        """Result for the store as this session knows it: the worker's own session may reconnect later."""
        while not self.is_over:
            result = SlabProbeResult(**await self._probe_slab())
            if result.generation == self._session.welcome.generation:
                return result
            await asyncio.sleep(RETRY_S)
        return SlabProbeResult(failure="the session with the store has ended")


class SlabWatch:
    """`own` is the instance's current offer; `run` publishes its changes."""

    def __init__(self, setting: TransportSetting, has_region: bool, prober: SlabProber | None) -> None:
        """`prober` has probed once; None if this engine has no GPU of its own, or does not use it.

        Raises:
            TransportError: `setting` asks for what cannot be had here.
        """
        self._has_region = has_region
        self._prober = prober
        self._setting = setting
        self.own = self._capabilities(setting)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        socket: Path,
        instance: str,
        setting: TransportSetting,
        *,
        has_region: bool,
        probe_slab: ProbeSlab | None,
    ) -> "AsyncIterator[SlabWatch]":
        """Open a watch; `probe_slab` is None if the engine has no GPU of its own.

        Raises:
            TransportError: `setting` asks for what cannot be had here.
            StoreError: there is no store, or it refuses us.
        """
        if probe_slab is None or setting not in ("auto", "cuda_ipc"):
            yield cls(setting, has_region, None)
            return
        changes = StoreChanges()
        async with await AsyncStoreSession.connect(
            socket,
            f"{instance}/{SLAB_SESSION}",
            on_reconnect=changes.on_reconnect,
            on_disconnect=changes.on_disconnect,
            reconnect_timeout_s=STORE_RECONNECT_S,
        ) as session:
            prober = SlabProber(session, probe_slab, changes)
            await prober.probe()
            yield cls(setting, has_region, prober)

    def fields(self) -> dict[str, Any]:
        return {
            "transports": self.own.transports,
            "device": self.own.device,
            "slab_generation": self.own.slab_generation,
            "slab_failure": None if self._prober is None else self._prober.failure,
        }

    async def run(self, registration: Registration) -> None:
        """Publish changes until cancelled, or until nothing can change any more."""
        reprobe_s, prober = FIRST_REPROBE_S, self._prober
        while prober is not None and not prober.is_over:
            before = self.fields()
            if await prober.wait_for_change(None if prober.failure is None else reprobe_s):
                reprobe_s = FIRST_REPROBE_S
            else:
                reprobe_s = min(2 * reprobe_s, LONGEST_REPROBE_S)
            await prober.probe()
            try:
                self.own = self._capabilities(self._setting)
            except TransportError:  # an instance that works goes on with what it can do
                self.own = self._capabilities("auto")
            if self.fields() == before:
                continue
            try:
                await registration.update(**self.fields())
            except BusUnavailableError as error:
                log.warning("transports not announced yet", error=str(error))

    def _capabilities(self, setting: TransportSetting) -> TransportCapabilities:
        slab = NO_GPU if self._prober is None else self._prober.result
        return announced_capabilities(setting, slab=slab, has_region=self._has_region)
