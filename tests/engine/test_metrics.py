"""Every service is scraped where `./triptych status` says, after one request with an image."""

from types import ModuleType

import pytest

from tests.support.real.system import MODEL, System, image_part
from tests.support.scraping import Scrape, scrape
from tests.support.waiting import wait_until
from triptych_cli.supervisor.state import read_status

pytestmark = pytest.mark.engine

LIMIT_S = 20.0
QUESTION = {"type": "text", "text": "read the digits"}


def metrics_ports(system: System) -> dict[str, int]:
    """By service."""
    status = read_status(system.run_dir / "supervisor.json")
    assert status is not None
    return {each.name: each.metrics_port for each in status.services if each.metrics_port is not None}


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
