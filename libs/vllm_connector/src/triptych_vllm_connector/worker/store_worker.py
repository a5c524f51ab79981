"""Base class of both ends of the handover in a worker: the store session, the transports, and spans.

Both run inside vLLM's step, on its thread. Neither waits for the store: commands are sent, and the session's
thread reads the answers. The transport carries the bytes (`transports`).
"""

from triptych_common.domain.errors import TriptychError
from triptych_common.protocol.store import Welcome
from triptych_common.store_session import StoreSession
from triptych_common.telemetry import record_span
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.config import STORE_RECONNECT_S, StoreConfig, worker_session_name
from triptych_vllm_connector.slab_probe import SlabProbeResult
from triptych_vllm_connector.worker.transports import WorkerTransports

log = get_logger(__name__)

TRANSFER_ERRORS = (TriptychError, ValueError, RuntimeError, MemoryError)
"""Errors of a transfer; torch raises RuntimeErrors, also for out of memory.

`torch.AcceleratorError` is the exception: after it nothing on the device can be trusted.
"""


class StoreWorker:
    def __init__(self, config: StoreConfig, rank: int, device_type: str) -> None:
        self._config = config
        self._opened: WorkerTransports | None = None  # for the session's thread, which may come first
        self._session = StoreSession.connect(
            config.store_socket,
            worker_session_name(config.instance, rank),
            on_push=lambda push: None,
            on_disconnect=self._on_disconnect,
            on_outage=self._on_outage,
            on_reconnect=self._on_reconnect,
            timeout_s=config.store_timeout_s,
            reconnect_timeout_s=STORE_RECONNECT_S,
            namespace_digest=config.namespace_digest,
        )
        try:
            self._transports = WorkerTransports(config, self._session, device_type)
        except BaseException:
            self._session.close()  # its name is free again
            raise
        self._opened = self._transports
        self._rank = rank

    @property
    def has_ended(self) -> bool:
        """True if the session is over and its region replaced, or it was closed."""
        return self._session.has_ended

    @property
    def region_id(self) -> str:
        """Id of the store's region at the last hello."""
        return self._session.welcome.region_id

    def probe_slab(self) -> SlabProbeResult:
        return self._transports.probe_slab()

    def close(self) -> None:
        self._transports.close()
        self._session.close()

    def _on_disconnect(self, error: Exception | None) -> None:
        if error is not None:
            log.error("store session lost", instance=self._config.instance, error=str(error))

    def _on_outage(self, error: Exception) -> None:
        if self._opened is not None:
            self._opened.on_outage()

    def _on_reconnect(self, welcome: Welcome) -> None:
        if self._opened is not None:
            self._opened.on_reconnect(welcome.generation)

    def _span(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        traceparent: str | None,
        mm_hash: str,
        **attributes: str | int,
    ) -> None:
        record_span(
            name,
            start_ns,
            end_ns,
            traceparent=traceparent,
            attributes={
                "triptych.instance": self._config.instance,
                "triptych.mm_hash": mm_hash,
                **{f"triptych.{key}": value for key, value in attributes.items()},
            },
        )
