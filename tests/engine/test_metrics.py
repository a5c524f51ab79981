"""Every service is scraped where `./triptych status` says, after one request with an image; and by a real
Prometheus, where there is one: the dashboard's expressions about prefill_decode show what it answers.
"""

import asyncio
from types import ModuleType
from typing import Any

import pytest

from tests.support.observability import panel_queries, rule_queries, selectors
from tests.support.prometheus import require_binaries, running_prometheus
from tests.support.real.system import MODEL, System, image_part
from tests.support.scraping import Scrape, scrape
from tests.support.waiting import wait_until
from triptych_cli.supervisor.state import read_status
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registry
from triptych_common.protocol.messages import InstanceRecord, Role

pytestmark = pytest.mark.engine

LIMIT_S = 20.0
NOT_CAUSED = frozenset(
    f"triptych_prefill_decode_{event}_total"
    for event in (
        "failed_loads",  # its transport can read: test_redis_transport.py has one that cannot
        "local_encodes",  # it has no vision tower: those of roles/test_topologies.py do
        "stalls",  # its budget is large: that of test_waiting.py is not
    )
)
"""Metrics of what does not happen to this system: a series of an engine begins with its first event."""
QUESTION = {"type": "text", "text": "read the digits"}


def metrics_ports(system: System) -> dict[str, int]:
    """By service."""
    status = read_status(system.run_dir / "supervisor.json")
    assert status is not None
    return {each.name: each.metrics_port for each in status.services if each.metrics_port is not None}


def announced(system: System) -> InstanceRecord:
    """The record of prefill_decode, as of its last heartbeat."""

    async def read() -> list[InstanceRecord]:
        url = f"unix://{system.run_dir / 'redis.sock'}"
        async with await AsyncBus.connect(url, "default", client_name="test") as bus:
            return await Registry(bus).list_instances()

    return next(each for each in asyncio.run(read()) if each.role is Role.PREFILL_DECODE)


def num_announced(system: System) -> int:
    """Requests that prefill_decode says to compute."""
    load = announced(system).load
    assert load is not None
    return load.num_running


def test_an_instance_announces_its_load(system: System) -> None:
    wait_until(lambda: num_announced(system) == 0, LIMIT_S, "nothing runs")
    with system.openai as client:
        stream = client.chat.completions.create(
            model=MODEL.name,
            messages=[{"role": "user", "content": "count"}],
            max_tokens=2000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        with stream:
            next(iter(stream))
            wait_until(lambda: num_announced(system) == 1, LIMIT_S, "one runs")
            busy = announced(system)
    assert busy.load is not None
    assert busy.load.kv_usage is not None
    assert 0 < busy.load.kv_usage < 1
    assert busy.kv_cache_tokens is not None
    assert busy.kv_cache_tokens > 2000
    wait_until(lambda: num_announced(system) == 0, LIMIT_S, "it is over")


def test_a_request_shows_in_every_services_metrics(system: System, strips: ModuleType) -> None:
    (strip,) = strips.held_out_strips(1, length=None, seed=4711)
    system.ask([QUESTION, image_part(strip.png)], stream=True)
    ports = metrics_ports(system)
    assert ports.keys() == {"cache_store-0", "encoder-0", "prefill_decode-0", "gateway-0"}

    def total(service: str, name: str, **labels: str) -> float:
        return scrape(ports[service]).total(name, **labels)

    for service, name, labels in (
        ("cache_store-0", "triptych_store_seals_total", {}),
        ("encoder-0", "triptych_encoder_seals_total", {}),
        ("encoder-0", "triptych_encoder_encode_seconds_count", {"modality": "image"}),
        ("prefill_decode-0", "triptych_prefill_decode_handover_bytes_total", {"transport": "pinned_shm"}),
        ("prefill_decode-0", "triptych_prefill_decode_preallocations_total", {"decision": "granted"}),
        ("prefill_decode-0", "vllm:time_to_first_token_seconds_count", {}),
        (
            "gateway-0",
            "triptych_gateway_time_to_first_token_seconds_count",
            {"route": "/v1/chat/completions", "model": MODEL.name, "modality": "image"},
        ),
        ("gateway-0", "triptych_gateway_redis_up", {}),
    ):
        wait_until(lambda at=(service, name), by=labels: total(*at, **by) > 0, LIMIT_S, f"{name} {labels}")
    engine: Scrape = scrape(ports["prefill_decode-0"])
    assert engine.total("triptych_prefill_decode_parked_requests") == 0
    assert engine.total("triptych_prefill_decode_budget_embeds_in_use") == 0


def test_prefill_decode_has_the_gauges_that_inference_gateways_read(system: System) -> None:
    """The model-server protocol of the Gateway API inference extension (`docs/guide/front_ends.md`)."""
    scraped = scrape(metrics_ports(system)["prefill_decode-0"])
    samples = [sample for family in scraped.families for sample in family.samples]
    gauges = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")
    for name in gauges:
        (sample,) = [each for each in samples if each.name == name]
        assert sample.labels["model_name"] == MODEL.name
        assert sample.value >= 0
    (config,) = [each for each in samples if each.name == "vllm:cache_config_info"]
    assert int(config.labels["block_size"]) > 0
    assert int(config.labels["num_gpu_blocks"]) > 0


def test_the_dashboard_shows_prefill_decode_as_it_is(system: System, strips: ModuleType) -> None:
    require_binaries()
    known, new = strips.held_out_strips(2, length=None, seed=4712)
    jobs = {
        "triptych-" + name.rpartition("-")[0]: [f"127.0.0.1:{port}"]
        for name, port in metrics_ports(system).items()
    }
    ours, answered = ("triptych_prefill_decode_", "vllm:"), "vllm:e2e_request_latency_seconds_count"
    system.ask([QUESTION, image_part(known.png)], stream=True)  # each series is there before it is rated
    with running_prometheus(jobs) as prometheus:
        before = prometheus.value(answered)
        system.ask([QUESTION, image_part(new.png)], stream=True)
        prometheus.wait_for(answered, before + 1)
        shown: dict[str, list[dict[str, Any]]] = {}
        for query in panel_queries():
            names = {each.name for each in selectors(query.expr)}
            if all(name.startswith(ours) for name in names) and not names & NOT_CAUSED:
                shown[str(query)] = prometheus.query(query.expr)
        for query in rule_queries():
            prometheus.query(query.expr)
        prometheus.wait_for_rules()
        faults = [
            (rule["name"], rule.get("lastError")) for rule in prometheus.rules() if rule["health"] != "ok"
        ]
    assert shown
    assert [query for query, samples in shown.items() if not samples] == []
    assert faults == []
