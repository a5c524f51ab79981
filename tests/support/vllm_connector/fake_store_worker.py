"""A worker of the encoder or of prefill_decode without a store: its session and its transports are fakes."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.store import Cancel, Descriptor, Done, Seal, StoreReply
from triptych_common.region.transport import OnRelease
from triptych_common.store_session import StoreSession
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.step_orders import WriteOrder
from triptych_vllm_connector.worker import store_worker

TENSOR = torch.arange(8, dtype=torch.float32).view(2, 4)


class FakeStoreSession:
    """Answers everything with Done; keeps the commands."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.is_closed = False

    def submit(self, command: Any) -> "Future[StoreReply]":
        self.sent.append(command)
        future: Future[StoreReply] = Future()
        future.set_result(Done(seq=1))
        return future

    def close(self) -> None:
        self.is_closed = True

    @property
    def sealed(self) -> list[int]:
        """Reservations."""
        return [each.reservation_id for each in self.sent if isinstance(each, Seal)]

    @property
    def cancelled(self) -> list[int]:
        """Reservations."""
        return [each.reservation_id for each in self.sent if isinstance(each, Cancel)]


class FakeTransports:
    """One end for every memory, which fails while `is_broken`, and opens TENSOR for every descriptor."""

    def __init__(self) -> None:
        self.is_broken = False
        self.error: Exception = BusUnavailableError("away")
        self.memories: list[str] = []
        self.written: list[tuple[int, torch.Tensor]] = []  # by reservation

    def writer(self, memory: str) -> "FakeTransports":
        self.memories.append(memory)
        return self

    reader = writer

    def write(self, order: WriteOrder, tensor: torch.Tensor) -> None:
        if self.is_broken:
            raise self.error
        self.written.append((order.reservation_id, tensor.clone()))

    def open(self, descriptor: Descriptor, on_release: OnRelease) -> torch.Tensor:
        if self.is_broken:
            raise self.error
        on_release()
        return TENSOR

    def extent(self, memory: str) -> None:
        return None

    def close(self) -> None:
        pass


def without_store(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeStoreSession, FakeTransports]:
    """What each worker that is made from now on has."""
    session, transports = FakeStoreSession(), FakeTransports()
    monkeypatch.setattr(StoreSession, "connect", lambda *args, **kwargs: session)
    monkeypatch.setattr(store_worker, "WorkerTransports", lambda *args: transports)
    return session, transports


def worker_config(tmp_path: Path) -> ConnectorConfig:
    return ConnectorConfig(
        instance="i-0",
        deployment="d",
        redis_url="unix:///nowhere",
        store_socket=tmp_path / "store.sock",
        namespace_digest="0" * 64,
    )
