"""A real Prometheus scrapes real services: each expression of the dashboard and of the rules can be evaluated
on what they answer, and shows something where traffic has made something. vLLM is stood in for: real engines
answer in tests/engine/test_metrics.py.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.conftest import embedded_redis
from tests.support.fast.case import check
from tests.support.fast.client import Client, Question
from tests.support.fast.layout import Layout
from tests.support.fast.processes.tensors import png
from tests.support.fast.system import FastSystem
from tests.support.observability import panel_queries, rule_queries, selectors
from tests.support.prometheus import Binaries, PrometheusServer, running_prometheus
from tests.support.waiting import free_port
from triptych_common.protocol.steps import Party

LIMIT_S = 30.0
GATEWAY_PREFIX, ENCODER_PREFIX, STORE_PREFIX = "triptych_gateway_", "triptych_encoder_", "triptych_store_"
NOT_CAUSED = frozenset(
    {
        "ALERTS",
        "triptych_gateway_limited_requests_total",  # of keys
        "triptych_gateway_stage_retries_total",
        "triptych_gateway_local_encodes_total",  # of an instance with a vision tower
        "triptych_gateway_encode_failures_total",
        "triptych_gateway_fetches_total",
        "triptych_gateway_transfers_ordered_total",  # between stores
        "triptych_gateway_transfers_total",
        "triptych_gateway_file_uploads_total",
        "triptych_gateway_files_encoded_ahead_total",
        "triptych_encoder_job_failures_total",
        "triptych_encoder_store_hits_total",
        "triptych_store_slab_bytes",
        "triptych_store_refusals_total",
    }
)
"""Metrics with labels of what has not happened here: a series begins with its first event."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def system(binaries: Binaries, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastSystem]:
    socket = tmp_path_factory.mktemp("store") / "metrics.sock"
    layout = Layout(
        num_encoders=1,
        num_prefill_decodes=1,
        options={
            Party.CACHE_STORE: (f"--metrics-socket={socket}",),
            Party.ENCODER: (f"--metrics-port={free_port()}",),
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
    """It has scraped what the traffic below has made, twice."""
    targets = {
        "gateway": [system.url().removeprefix("http://")],
        "encoder": [f"127.0.0.1:{option(system, Party.ENCODER)}"],
        "cache_store": [store_metrics],
    }
    with running_prometheus(targets) as server:
        for _ in range(2):  # a rate is of two scrapes
            before = server.value("sum(triptych_gateway_requests_total)")
            asyncio.run(cause_traffic(system))
            server.wait_for("sum(triptych_gateway_requests_total)", before + 5)
            server.wait_for("sum(triptych_store_seals_total)", 2)
        server.wait_for_rules()
        yield server


async def cause_traffic(system: FastSystem) -> None:
    """Streams and whole answers, an image that is new and one that is known, and a refusal."""
    images = [Question("what?", (png(number),)) for number in (1, 2)]
    async with Client(system.url(), LIMIT_S) as client:
        together = await asyncio.gather(*(client.ask(each) for each in (*images, images[0])))
        whole = await client.ask(Question("text", stream=False))
        refused = await client.ask(Question("bad", (b"no image",)))
    check([*together, whole])
    assert refused.status == 400


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
