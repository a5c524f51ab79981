"""The links to the store and the bus, over fake sessions; and that all of this needs no vLLM."""

import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_engine import mm_hash, watching
from triptych_common.domain.errors import StoreUnavailableError
from triptych_common.protocol.messages import Decision, EncodeNeeded, ItemAck, Outcome, Preallocation
from triptych_common.protocol.names import StreamNames
from triptych_common.protocol.store import StoreReply
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.links import links
from triptych_vllm_connector.links.links import BusMessageSender, StorePinLink

A = mm_hash("a")
WORD: dict[str, Any] = {
    "request_id": "r", "item_index": 0, "job_id": "j", "mm_hash": A, "prefill_decode": "pd-0"
}  # fmt: skip


class FakeStoreSession:
    """`StoreSession`: keeps the commands and what was asked of `connect`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs
        self.sent: list[tuple[Any, Future[StoreReply]]] = []
        self.is_closed = False

    def submit(self, command: Any) -> Future[StoreReply]:
        future: Future[StoreReply] = Future()
        self.sent.append((command, future))
        return future

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def config(tmp_path: Path) -> ConnectorConfig:
    return ConnectorConfig(
        instance="pd-0",
        deployment="d",
        redis_url="unix:///nowhere",
        store_socket=tmp_path / "store.sock",
        namespace_digest="0" * 64,
    )


@pytest.fixture
def heard() -> list[Any]:
    return []


@pytest.fixture
def link(config: ConnectorConfig, heard: list[Any], monkeypatch: pytest.MonkeyPatch) -> StorePinLink:
    fake = type("_", (), {"connect": FakeStoreSession})
    monkeypatch.setattr(links, "StoreSession", fake)
    return StorePinLink(
        config,
        2,
        on_reply=lambda mm_hash, reply: heard.append((mm_hash, reply)),
        on_push=heard.append,
        on_lost=lambda: heard.append("lost"),
    )


def session_of(link: StorePinLink) -> FakeStoreSession:
    session = link._session
    assert isinstance(session, FakeStoreSession)
    return session


def test_the_session_is_the_engines(link: StorePinLink, config: ConnectorConfig) -> None:
    session = session_of(link)
    assert session.args == (config.store_socket, "pd-0/engine")
    assert session.kwargs["namespace_digest"] == "0" * 64


def test_a_reply_is_told_with_its_item(link: StorePinLink, heard: list[Any]) -> None:
    link.pin_or_watch(A)
    command, future = session_of(link).sent[0]
    assert (command.kind, command.mm_hash, command.num_holders) == ("pin_or_watch", A, 2)
    assert heard == []
    future.set_result(watching(A))
    assert heard == [(A, watching(A))]


def test_a_broken_session_is_told_as_the_reply(link: StorePinLink, heard: list[Any]) -> None:
    link.pin_or_watch(A)
    error = StoreUnavailableError("gone")
    session_of(link).sent[0][1].set_exception(error)
    assert heard == [(A, error)]


def test_a_pin_ends_once_per_holder(link: StorePinLink) -> None:
    link.unpin(7)
    link.unwatch(A)
    assert [command.kind for command, _ in session_of(link).sent] == ["unpin", "unpin", "unwatch"]


def test_the_end_of_the_session_is_told(link: StorePinLink, heard: list[Any]) -> None:
    session_of(link).kwargs["on_disconnect"](None)
    assert heard == ["lost"]
    link.close()
    assert session_of(link).is_closed


class FakeBus:
    def __init__(self) -> None:
        self.published: list[tuple[str, str]] = []

    def publish(self, stream: str, message: Any, *, traceparent: str | None = None) -> None:
        self.published.append((stream, message.TYPE))


def test_words_go_to_the_streams_of_those_they_are_for() -> None:
    bus, names = FakeBus(), StreamNames("d")
    link = BusMessageSender(bus, names)  # type: ignore[arg-type]
    link.to_encoder("e", Preallocation(**WORD, decision=Decision.GRANTED), None)
    link.to_encoder("e", ItemAck(**WORD, outcome=Outcome.INJECTED), None)
    needed = {key: value for key, value in WORD.items() if key != "job_id"}
    link.to_gateway("g", EncodeNeeded(**needed, reason="absent"), None)
    assert bus.published == [
        (names.preallocations("e"), "Preallocation"),
        (names.acks("e"), "ItemAck"),
        (names.encode_results("g"), "EncodeNeeded"),
    ]


def test_the_consumer_and_all_below_it_import_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, triptych_vllm_connector.consumer.consumer, triptych_vllm_connector.step_orders,"
        " triptych_vllm_connector.config, triptych_vllm_connector.host.engine_options,"
        " triptych_vllm_connector.host.namespace, triptych_vllm_connector.links.links;"
        " print(sorted({'vllm', 'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
