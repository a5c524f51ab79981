"""How an engine opens its links: the store session, and that all of this needs no vLLM."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.vllm_connector.fake_engine import FakeStoreSession
from tests.support.vllm_connector.fake_store_worker import worker_config
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.consumer.consumer import Inbox
from triptych_vllm_connector.links import opening
from triptych_vllm_connector.links.readable_pins import ReadablePins


@pytest.fixture
def config(tmp_path: Path) -> ConnectorConfig:
    return worker_config(tmp_path)


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def pins(config: ConnectorConfig, inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReadablePins]:
    monkeypatch.setattr(opening, "StoreSession", type("_", (), {"connect": FakeStoreSession}))
    pins = opening.open_pins(config, 2, inbox, lambda descriptor: True)
    yield pins
    pins.close()


def session_of(pins: ReadablePins) -> FakeStoreSession:
    session = pins._link._session  # type: ignore[attr-defined]
    assert isinstance(session, FakeStoreSession)
    return session


def test_the_session_is_the_engines(pins: ReadablePins, config: ConnectorConfig) -> None:
    session = session_of(pins)
    assert session.args == (config.store_socket, "i-0/engine")
    assert session.kwargs["namespace_digest"] == "0" * 64


def test_the_consumer_and_all_below_it_import_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, triptych_vllm_connector.consumer.consumer, triptych_vllm_connector.step_orders,"
        " triptych_vllm_connector.config, triptych_vllm_connector.host.engine_options,"
        " triptych_vllm_connector.host.namespace, triptych_vllm_connector.links.readable_pins,"
        " triptych_vllm_connector.links.opening, triptych_vllm_connector.links.opening;"
        " print(sorted({'vllm', 'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
