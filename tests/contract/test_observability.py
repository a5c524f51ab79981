"""Dashboard, alerts and scrape targets name what there is: metrics, labels, rows of the runbook, services."""

import importlib.util
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.contract.test_compose import ComposeLoader
from tests.contract.test_docs import ROOT, anchors, sections
from tests.contract.test_metrics import PAGE, SERVICES, described
from tests.support.observability import (
    GRAFANA,
    RULE_TESTS,
    Query,
    alert_rules,
    dashboard_module,
    grouping_labels,
    load,
    panel_queries,
    rule_queries,
    selectors,
)
from triptych_common.telemetry.metrics import MetricFacts

RUNBOOK = (ROOT / "docs" / "operations" / "runbook.md").read_text()
OBSERVABILITY = (ROOT / "docs" / "operations" / "observability.md").read_text()
COMPOSE = load(ROOT / "compose.yaml")
PROFILE = "observability"
QUERIES = [*panel_queries(), *rule_queries()]
FROM_PROMETHEUS = {"up": frozenset[str](), "ALERTS": frozenset({"alertname", "alertstate", "severity"})}
FROM_SCRAPES = frozenset({"job", "instance"})
SEVERITIES = {"critical", "warning", "info"}
ROW_OF_VLLM = re.compile(r"^\| `(vllm:\w+)` \| (\w+) \|", re.MULTILINE)
ROW_OF_ALERT = re.compile(r'^\| <a id="([\w-]+)"></a>`(\w+)` \| .+ \| .+ \| .+ \|$', re.MULTILINE)
ROW_OF_RULE = re.compile(
    r"^\| \[`(\w+)`\]\(runbook\.md#([\w-]+)\) \| (\w+) \| ([^|]+) \| .+ \|$", re.MULTILINE
)


def series_of(facts: MetricFacts) -> dict[str, frozenset[str]]:
    """Names of its series, with their labels."""
    labels = frozenset(facts.labels)
    if facts.kind != "histogram":
        return {facts.name: labels}
    return {
        f"{facts.name}_bucket": labels | {"le"},
        f"{facts.name}_sum": labels,
        f"{facts.name}_count": labels,
    }


def documented() -> list[MetricFacts]:
    ours = [each for title in SERVICES for each in described(sections(PAGE)[title])]
    labels = ("model_name", "engine")
    return [*ours, *(MetricFacts(name, kind, labels) for name, kind in ROW_OF_VLLM.findall(PAGE))]


def known_series() -> dict[str, frozenset[str]]:
    found = dict(FROM_PROMETHEUS)
    for each in documented():
        found |= series_of(each)
    return found


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.title.replace(" ", "_"))
def test_an_expression_reads_documented_series_by_their_labels(query: Query) -> None:
    known = known_series()
    read = list(selectors(query.expr))
    assert read, query
    for each in read:
        assert each.name in known, f"{each.name} is not in docs/reference/metrics.md; {query}"
        unknown = each.labels - known[each.name] - FROM_SCRAPES
        assert not unknown, f"{each.name} has no label {', '.join(unknown)}; {query}"
    labels = frozenset().union(*(known[each.name] for each in read)) | FROM_SCRAPES
    assert grouping_labels(query.expr) <= labels, query


def test_every_documented_metric_is_on_the_dashboard() -> None:
    shown = {each.name for query in panel_queries() for each in selectors(query.expr)}
    missing = [each.name for each in documented() if not shown & series_of(each).keys()]
    assert not missing


def test_the_metrics_of_vllm_are_vllms() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    source = (Path(spec.submodule_search_locations[0]) / "v1" / "metrics" / "loggers.py").read_text()
    there = set(re.findall(r'name="(vllm:\w+)"', source))
    named = {name.removesuffix("_total") for name, _ in ROW_OF_VLLM.findall(PAGE)}
    assert named
    assert named <= there


def test_the_dashboard_is_made_of_its_panels() -> None:
    module = dashboard_module()
    made = module.text_of(module.dashboard(load(GRAFANA / "panels.yaml")))
    assert made == module.DASHBOARD.read_text(), "run: python deploy/observability/grafana/dashboard.py"


def test_each_alert_has_its_row_in_the_runbook() -> None:
    rows = {name: anchor for anchor, name in ROW_OF_ALERT.findall(RUNBOOK)}
    named = {}
    for rule in alert_rules():
        assert set(rule["annotations"]) == {"summary", "runbook"}, rule["alert"]
        path, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert path == "docs/operations/runbook.md", rule["alert"]
        assert anchor in anchors(ROOT / path), rule["alert"]
        assert rule["labels"]["severity"] in SEVERITIES, rule["alert"]
        named[rule["alert"]] = anchor
    assert len(named) == len(alert_rules()), "one rule for each name"
    assert rows == named


def test_the_page_lists_exactly_the_alerts() -> None:
    on_page = {
        name: (anchor, severity, lasts)
        for name, anchor, severity, lasts in ROW_OF_RULE.findall(OBSERVABILITY)
    }
    in_rules = {
        rule["alert"]: (
            rule["annotations"]["runbook"].partition("#")[2],
            rule["labels"]["severity"],
            rule.get("for", "at once"),
        )
        for rule in alert_rules()
    }
    assert on_page == in_rules


def test_each_alert_is_made_to_fire_and_to_be_quiet() -> None:
    cases = {case["name"]: case["promql_expr_test"] for case in load(RULE_TESTS)["tests"]}
    cases.pop("a healthy system")
    assert set(cases) == {rule["alert"] for rule in alert_rules()}
    for name, (quiet, firing) in cases.items():
        expr = f'count(ALERTS{{alertname="{name}", alertstate="firing"}})'
        assert quiet["expr"] == firing["expr"] == expr
        assert quiet["exp_samples"] == []
        assert firing["exp_samples"] == [{"labels": "{}", "value": 1}]


FILES = ((), ("compose.gpu.yaml",), ("compose.epd.yaml",), ("compose.gpu.yaml", "compose.epd.yaml"))
PROFILES = ("observability", "tracing", "observability tracing")
CONFIG_FOLDER = "/etc/prometheus"


def services_of(files: tuple[str, ...], profiles: Collection[str]) -> dict[str, dict[str, Any]]:
    """The services that these files start on top of compose.yaml, as far as this test reads them."""
    services: dict[str, dict[str, Any]] = {}
    for file in ("compose.yaml", *files):
        for name, given in yaml.load((ROOT / file).read_text(), ComposeLoader)["services"].items():  # noqa: S506
            base = COMPOSE["services"][given["extends"]["service"]] if "extends" in given else {}
            services[name] = merged(services.get(name, {}), merged(base, given))
    return {
        name: each
        for name, each in services.items()
        if "profiles" not in each or set(each["profiles"]) & set(profiles)
    }


def merged(base: Any, given: Any) -> Any:
    if isinstance(base, dict) and isinstance(given, dict):
        return base | {key: merged(base.get(key), value) for key, value in given.items()}
    if isinstance(base, list) and isinstance(given, list):
        return base + given
    return given


def scraped_of(prometheus: dict[str, Any]) -> dict[str, tuple[str, int]]:
    """Host and port of each job, from the files that Compose mounts for Prometheus."""
    mounts = [each.split(":")[:2] for each in prometheus["volumes"]]
    folders = {target: ROOT / source for source, target in mounts if source.startswith("./")}
    config = load(folders.get(f"{CONFIG_FOLDER}/prometheus.yml", folders[CONFIG_FOLDER] / "prometheus.yml"))
    targets: dict[str, tuple[str, int]] = {}
    for job in config["scrape_configs"]:
        assert job["job_name"] not in targets, job
        if "dns_sd_configs" in job:
            ((found,),) = [job["dns_sd_configs"]]
            targets[job["job_name"]] = (found["names"][0], found["port"])
        else:
            host, _, port = job["static_configs"][0]["targets"][0].partition(":")
            targets[job["job_name"]] = (host, int(port))
    return targets


@pytest.mark.parametrize("profiles", PROFILES)
@pytest.mark.parametrize("files", FILES, ids=lambda files: "+".join(files) or "compose.yaml")
def test_every_service_with_metrics_is_a_target_and_each_target_is_a_service(
    files: tuple[str, ...], profiles: str
) -> None:
    services = services_of(files, profiles.split())
    having = {
        name: int(environment.get("TRIPTYCH_METRICS_PORT", environment.get("TRIPTYCH_PORT")))
        for name, environment in ((name, each.get("environment", {})) for name, each in services.items())
        if {"TRIPTYCH_METRICS_PORT", "TRIPTYCH_PORT"} & set(environment)
    }
    assert {"gateway", "encoder"} <= set(having)
    if "prometheus" not in services:
        assert PROFILE not in profiles.split()
        return
    targets = scraped_of(services["prometheus"])
    assert dict(targets.values()) == having
    jobs = {name: "cache_store" if name == "store-metrics" else name for name in having}
    assert {job: host for job, (host, _) in targets.items()} == {
        f"triptych-{job}": host for host, job in jobs.items()
    }, "jobs of other products have other names"
    for name in ("prometheus", *having):
        assert "backend" in services[name]["networks"], name


def test_rules_compare_jobs_that_there_are() -> None:
    known = set().union(*(scraped_of(services_of(files, [PROFILE])["prometheus"]) for files in FILES))
    named = {job for query in QUERIES for job in re.findall(r'job="([^"]+)"', query.expr)}
    assert named == known


def test_the_profiles_services_are_pinned_and_published_on_this_host_alone() -> None:
    of_profile = {
        name: each for name, each in COMPOSE["services"].items() if PROFILE in each.get("profiles", ())
    }
    assert set(of_profile) == {"store-metrics", "prometheus", "grafana", "jaeger"}
    for name, service in of_profile.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        if name != "store-metrics":
            assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", service["image"]), name
    assert COMPOSE["services"]["cache_store"]["network_mode"] == "none"
    (volume,) = of_profile["store-metrics"]["volumes"]
    assert volume == "run:/run/triptych:ro"


def test_grafana_finds_its_sources_and_the_dashboard_where_compose_has_them() -> None:
    provisioning = GRAFANA / "provisioning"
    for source in load(provisioning / "datasources" / "prometheus.yaml")["datasources"]:
        host = re.fullmatch(r"http://(\w+):\d+", source["url"])
        assert host is not None, source
        assert PROFILE in COMPOSE["services"][host[1]]["profiles"], source
    (provider,) = load(provisioning / "dashboards" / "triptych.yaml")["providers"]
    mounts = [each.split(":") for each in COMPOSE["services"]["grafana"]["volumes"]]
    folders = {target: (ROOT / source).resolve() for source, target, *_ in mounts if source.startswith(".")}
    assert folders["/etc/grafana/provisioning"] == provisioning
    assert folders[provider["options"]["path"]] == dashboard_module().DASHBOARD.parent


def test_grafana_needs_a_password_and_shows_nothing_without_it() -> None:
    grafana = COMPOSE["services"]["grafana"]
    environment = grafana["environment"]
    assert environment["GF_SECURITY_ADMIN_PASSWORD"] == "${TRIPTYCH_GRAFANA_PASSWORD:-}"
    assert "$${GF_SECURITY_ADMIN_PASSWORD:?" in grafana["entrypoint"][-1]
    assert environment["GF_AUTH_ANONYMOUS_ENABLED"] == environment["GF_USERS_ALLOW_SIGN_UP"] == "false"
