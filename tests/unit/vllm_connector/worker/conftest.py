"""A worker's session and transports, without a store."""

from pathlib import Path

import pytest

from tests.support.vllm_connector.fake_store_worker import (
    FakeStoreSession,
    FakeTransports,
    without_store,
    worker_config,
)
from triptych_vllm_connector.config import ConnectorConfig


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeStoreSession, FakeTransports]:
    return without_store(monkeypatch)


@pytest.fixture
def session(fakes: tuple[FakeStoreSession, FakeTransports]) -> FakeStoreSession:
    return fakes[0]


@pytest.fixture
def transports(fakes: tuple[FakeStoreSession, FakeTransports]) -> FakeTransports:
    return fakes[1]


@pytest.fixture
def config(tmp_path: Path) -> ConnectorConfig:
    return worker_config(tmp_path)
