"""docs/reference/metrics.md lists exactly the metrics of each service, with types and labels."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.contract.test_docs import ROOT, sections
from tests.support.stores import core_on
from triptych_cache_store.core.metrics import render
from triptych_cache_store.core.state import HandedOver
from triptych_common.protocol.store import SlabInfo
from triptych_common.region.layout import RegionLayout
from triptych_common.telemetry.metrics import PREFIX, MetricFacts
from triptych_encoder.metrics import EncoderMetrics
from triptych_fabric.metrics import FabricMetrics
from triptych_gateway.metrics import GatewayMetrics
from triptych_vllm_connector.engine_counters import ENGINE_METRICS

PAGE = (ROOT / "docs" / "reference" / "metrics.md").read_text()
ROW = re.compile(rf"^\| `({PREFIX}_\w+)` \| (\w+) \|\s*([^|]*?)\s*\| [^|]+ \| [^|]+ \|$", re.MULTILINE)
CREATED = ("counter", "gauge", "histogram")


def store_facts() -> list[MetricFacts]:
    """Of a store that has everything that a store can have."""
    layout = RegionLayout.fit(1 << 20, 1 << 16)
    slab = SlabInfo(memory=f"cuda:GPU-{'0' * 36}", num_bytes=1 << 20, ipc_handle="00" * 64)
    core = core_on(bytearray(1 << 20), layout, slab=slab)
    core.state.counters.num_refused["reserve", "too_large"] += 1
    core.state.counters.num_pinned[HandedOver("encoder-0", "prefill_decode-0", "pinned_shm")] += 1
    facts = []
    for family in text_string_to_metric_families(render(core.state, 0.0)):
        labels = tuple(dict.fromkeys(key for each in family.samples for key in each.labels if key != "le"))
        name = family.name.removeprefix(f"{PREFIX}_")
        facts.append(MetricFacts.of(family.type, name, labels))
    return facts


SERVICES = {
    "Gateway": lambda: GatewayMetrics().metrics.facts,
    "Encoder": lambda: EncoderMetrics().metrics.facts,
    "Prefill_decode": lambda: [metric.facts() for metric in ENGINE_METRICS],
    "Cache_store": store_facts,
    "Fabric agent": lambda: FabricMetrics().metrics.facts,
}


def described(section: str) -> list[MetricFacts]:
    """Labels sorted, as in a scrape."""
    return [
        MetricFacts(match[1], match[2], tuple(sorted(re.findall(r"`(\w+)`", match[3]))))
        for match in ROW.finditer(section)
    ]


@pytest.mark.parametrize("title", SERVICES)
def test_the_page_lists_exactly_the_metrics(title: str) -> None:
    on_page = described(sections(PAGE)[title])
    in_code = [replace(each, labels=tuple(sorted(each.labels))) for each in SERVICES[title]()]
    assert len(on_page) == len(set(on_page)), "one row for each"
    assert {each.kind for each in in_code} <= set(CREATED)
    missing, made_up = set(in_code) - set(on_page), set(on_page) - set(in_code)
    assert not missing, "in the code, and not on the page"
    assert not made_up, "on the page, and not in the code"


def test_rows_are_in_no_other_section() -> None:
    rows = {match[1] for match in re.finditer(rf"^\| `({PREFIX}_\w+)`", PAGE, re.MULTILINE)}
    assert rows == {each.name for title in SERVICES for each in described(sections(PAGE)[title])}


def test_names_say_their_units() -> None:
    for title in SERVICES:
        for each in described(sections(PAGE)[title]):
            assert each.name.endswith("_total") == (each.kind == "counter"), each.name


DOCUMENTS = ("operations/runbook", "operations/security", "design/architecture", "reference/configuration")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_metrics_that_other_pages_name_are_there(document: str) -> None:
    known = {each.name for title in SERVICES for each in described(sections(PAGE)[title])}
    text = (Path(ROOT) / "docs" / f"{document}.md").read_text()
    named = set(re.findall(rf"`({PREFIX}_(?:gateway|encoder|store|prefill_decode)_\w+)(?:\{{[^`]*)?`", text))
    assert named <= known | {name for name in named if name in PACKAGES}


PACKAGES = frozenset({"triptych_cache_store", "triptych_prefill_decode", "triptych_vllm_connector"})
