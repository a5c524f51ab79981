"""A real Prometheus scrapes real services: each expression of the dashboard and of the rules can be evaluated
on what they answer, and shows something where traffic has made something. vLLM is stood in for: real engines
answer in tests/engine/test_metrics.py.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from tests.conftest import embedded_redis
from tests.support.fast.case import check
from tests.support.fast.client import Client, Question
from tests.support.fast.layout import DEPLOYMENT, Layout
from tests.support.fast.processes.tensors import MAX_GRID, png
from tests.support.fast.system import FastSystem
from tests.support.gateway.fake_stages import FakeDecode, FakePrefill
from tests.support.gateway.hosts import ANSWER, body, opened_hosts, text_of
from tests.support.gateway.samples import MODEL, entry, write_keys
from tests.support.observability import panel_queries, rule_queries, selectors
from tests.support.prometheus import Binaries, PrometheusServer, running_prometheus
from tests.support.protocol_steps import Party
from tests.support.waiting import free_port, wait_until
from triptych_common.domain.errors import ItemTooLargeError
from triptych_common.protocol.names import StreamNames
from triptych_common.protocol.store import Reserve, TensorSpec
from triptych_common.protocol.transfers import TransferFailureKind
from triptych_common.store_session import StoreSession

LIMIT_S = 30.0
CHAT = "/v1/chat/completions"
GATEWAY_PREFIX, ENCODER_PREFIX, STORE_PREFIX = "triptych_gateway_", "triptych_encoder_", "triptych_store_"
NOT_CAUSED = frozenset(
    {
        "ALERTS",  # on a healthy system none fires: test_rules.py
        "triptych_gateway_stage_retries_total",  # between hosts and stages: see the last test
        "triptych_gateway_transfers_ordered_total",
        "triptych_gateway_transfers_total",
        "triptych_store_slab_bytes",  # of a GPU: tests/gpu
        "triptych_encoder_fetch_seconds_bucket",  # of media by reference, and by URL: test_metrics.py
        "triptych_gateway_fetch_seconds_bucket",
    }
)
"""Metrics with labels of what has not happened to these services: a series begins with its first event."""
BETWEEN_HOSTS = frozenset(
    name for name in NOT_CAUSED if name.startswith(GATEWAY_PREFIX) and name.endswith("_total")
)
CAUSED_ONCE = (
    "triptych_gateway_limited_requests_total", "triptych_gateway_local_encodes_total",
    "triptych_gateway_fetches_total", "triptych_gateway_file_uploads_total",
    "triptych_gateway_files_encoded_ahead_total", "triptych_encoder_store_hits_total",
    "triptych_store_refusals_total",
)  # fmt: skip
KEY, LIMITED_KEY = "any", "limited"
ENCODE_BY = "X-Triptych-Encode"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def system(binaries: Binaries, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastSystem]:
    """Its second gateway has keys, files, media by URL, and callers who may say who encodes."""
    folder = tmp_path_factory.mktemp("scraped")
    folder.chmod(0o700)
    keys = write_keys(
        folder / "keys.toml", entry(KEY, KEY), entry(LIMITED_KEY, LIMITED_KEY, requests_per_minute=1)
    )
    layout = Layout(
        num_encoders=1,
        num_prefill_decodes=1,
        num_encode_prefill_decodes=1,
        num_gateways=2,
        options={
            Party.CACHE_STORE: (f"--metrics-socket={folder / 'metrics.sock'}",),
            Party.ENCODER: (f"--metrics-port={free_port()}",),
        },
        own_options={
            "gateway-1": (
                f"--api-keys-file={keys}",
                f"--files-dir={folder / 'files'}",
                "--encode-override=all",
            )
        },
    )
    with embedded_redis() as server, FastSystem(server, layout) as running:
        yield running


def option(system: FastSystem, party: Party) -> str:
    return system.layout.options[party][0].partition("=")[2]


@pytest.fixture(scope="module")
def store_metrics(system: FastSystem) -> Iterator[str]:
    """As in Compose: the relay's address; the store listens on its Unix socket alone."""
    port = free_port()
    environment = {
        **os.environ,
        "TRIPTYCH_RUN_DIR": str(system.folder),
        "TRIPTYCH_METRICS_SOCKET": option(system, Party.CACHE_STORE),
        "TRIPTYCH_METRICS_PORT": str(port),
    }
    relay = subprocess.Popen([sys.executable, "-m", "triptych_cache_store", "relay"], env=environment)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        relay.terminate()
        assert relay.wait(timeout=10) == 0


@pytest.fixture(scope="module")
def prometheus(system: FastSystem, store_metrics: str) -> Iterator[PrometheusServer]:
    """It has scraped what the traffic below has made."""
    gateways = [system.url(name).removeprefix("http://") for name in system.names_of(Party.GATEWAY)]
    targets = {
        "triptych-gateway": gateways,
        "triptych-encoder": [f"127.0.0.1:{option(system, Party.ENCODER)}"],
        "triptych-cache_store": [store_metrics],
    }
    with running_prometheus(targets) as server:
        for _ in range(2):  # a rate is of two scrapes
            before = server.value("sum(triptych_gateway_requests_total)")
            asyncio.run(cause_traffic(system))
            server.wait_for("sum(triptych_gateway_requests_total)", before + 5)
            server.wait_for("sum(triptych_store_seals_total)", 2)
        cause_more_traffic(system)
        cause_a_refusal_of_the_store(system)
        for name in CAUSED_ONCE:
            wait_until(lambda rate=f"rate({name}[1m])": bool(server.query(rate)), LIMIT_S, f"{name} twice")
        server.wait_for_rules()
        yield server


async def cause_traffic(system: FastSystem) -> None:
    """Streams and whole answers, an image that is new and one that is known, and two refusals."""
    images = [Question("what?", (png(number),)) for number in (1, 2)]
    undecodable = png(3, MAX_GRID)[:90]  # an encoder finds that
    async with Client(system.url(), LIMIT_S) as client:
        together = await asyncio.gather(*(client.ask(each) for each in (*images, images[0])))
        whole = await client.ask(Question("text", stream=False))
        refused = [await client.ask(Question("bad", (each,))) for each in (b"no image", undecodable)]
    check([*together, whole])
    assert [each.status for each in refused] == [400, 400]


def cause_more_traffic(system: FastSystem) -> None:
    """What the second gateway is for."""
    known = Question("again", (png(1),), stream=False)
    with httpx.Client(base_url=system.url("gateway-1"), timeout=LIMIT_S, trust_env=False) as http:

        def ask(body: dict[str, Any], key: str = KEY, **headers: str) -> int:
            answer = http.post(CHAT, json=body, headers={"Authorization": f"Bearer {key}"} | headers)
            return answer.status_code

        with redis.Redis.from_url(system.redis.url) as client:
            # So an encoder is asked, and finds that the store has it.
            client.delete(StreamNames(DEPLOYMENT).sizes)
        assert ask(known.body()) == 200
        assert ask(Question("here", (png(4),), stream=False).body(), **{ENCODE_BY: "local"}) == 200
        by_url = known.body()
        by_url["messages"][0]["content"][0]["image_url"]["url"] = "http://127.0.0.1/private.png"
        assert ask(by_url) == 400
        text = Question("text", stream=False).body()
        assert [ask(text, LIMITED_KEY) for _ in range(2)] == [200, 429]
        form = {"files": {"file": ("a.png", png(5))}, "data": {"purpose": "vision"}}
        stored = http.post("/v1/files", headers={"Authorization": f"Bearer {KEY}"}, **form)
        assert stored.status_code == 200, stored.text


def cause_a_refusal_of_the_store(system: FastSystem) -> None:
    num_rows = 1 << 20
    spec = TensorSpec(shape=(num_rows, 64), dtype="float32", num_bytes=num_rows * 256)
    with (
        closing(StoreSession.connect(system.folder / "store.sock", "test/refused")) as session,
        pytest.raises(ItemTooLargeError),
    ):
        session.request(Reserve(seq=0, mm_hash="f" * 64, spec=spec))


def shown_empty(server: PrometheusServer) -> list[str]:
    """Expressions of the dashboard that read these services alone, and show nothing."""
    prefixes = (GATEWAY_PREFIX, ENCODER_PREFIX, STORE_PREFIX, "up")
    found = []
    for query in panel_queries():
        names = {each.name for each in selectors(query.expr)}
        if all(name.startswith(prefixes) for name in names) and not names & NOT_CAUSED:
            found += [] if server.query(query.expr) else [str(query)]
    return found


def test_each_panel_can_be_evaluated_and_shows_what_traffic_makes(prometheus: PrometheusServer) -> None:
    for query in panel_queries():
        prometheus.query(query.expr)  # fails where it cannot
    assert shown_empty(prometheus) == []


def test_each_rule_is_evaluated_and_none_fires_on_a_healthy_system(prometheus: PrometheusServer) -> None:
    for query in rule_queries():
        prometheus.query(query.expr)
    rules = prometheus.rules()
    assert len(rules) == len(rule_queries())
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
    pending = {alert["labels"]["alertname"] for rule in rules for alert in rule["alerts"]}
    assert pending == {"TriptychPrefillDecodeGone"}, "the only one that is not scraped here"


async def test_panels_show_what_happens_between_hosts_and_stages(
    binaries: Binaries, redis_url: str, tmp_path: Path
) -> None:
    """A transfer that fails and is tried again, and a decode instance that cannot take over a KV cache."""
    async with opened_hosts(redis_url, tmp_path) as hosts, AsyncExitStack() as stack:
        system = hosts.system
        hosts.source.failures.append(TransferFailureKind.CORRUPTED)
        assert text_of(await system.post(body(1))) == ANSWER
        assert system.prefill_decode.registration is not None
        await system.prefill_decode.registration.announce_draining()
        prefill = FakePrefill()
        decode = FakeDecode(prefills=[prefill], behaviour="lost")
        for each in (prefill, decode):
            await stack.enter_async_context(each.running(system.bus))
        await system.refresh()
        failed = await system.post({"model": MODEL, "messages": [{"role": "user", "content": "hello"}]})
        assert failed.json()["error"]["code"] == "handover_failed"
        await asyncio.to_thread(check_panels_between_hosts, system.gateway.settings.port)


def check_panels_between_hosts(port: int) -> None:
    panels = [each for each in panel_queries() if {it.name for it in selectors(each.expr)} & BETWEEN_HOSTS]
    assert {it.name for each in panels for it in selectors(each.expr)} == BETWEEN_HOSTS
    with running_prometheus({"triptych-gateway": [f"127.0.0.1:{port}"]}) as server:
        for each in panels:
            wait_until(lambda expr=each.expr: bool(server.query(expr)), LIMIT_S, str(each))
