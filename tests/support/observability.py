"""The files of deploy/observability, and the PromQL in them, as tests read them."""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import promql_parser
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "observability"
PROMETHEUS = FOLDER / "prometheus"
RULES, RULE_TESTS = PROMETHEUS / "alerts.yml", PROMETHEUS / "alerts.test.yml"
CONFIG = PROMETHEUS / "prometheus.yml"
GRAFANA = FOLDER / "grafana"
INTERVAL = "$__rate_interval"  # Grafana puts a range in its place


@dataclass(frozen=True)
class Query:
    """One expression, and where it stands."""

    title: str
    expr: str

    def __str__(self) -> str:
        return f"{self.title}: {self.expr}"


@dataclass(frozen=True)
class Selector:
    """Series that an expression reads."""

    name: str
    labels: frozenset[str]  # that it compares


@cache
def dashboard_module() -> ModuleType:
    """What makes the dashboard."""
    spec = importlib.util.spec_from_file_location("triptych_dashboard", GRAFANA / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def alert_rules() -> list[dict[str, Any]]:
    return [rule for group in load(RULES)["groups"] for rule in group["rules"]]


def panel_queries(interval: str = "1m") -> list[Query]:
    """Of the dashboard, with `interval` where Grafana puts one."""
    described = load(GRAFANA / "panels.yaml")
    module = dashboard_module()
    found = module.expressions(module.dashboard(described))
    return [Query(title, expr.replace(INTERVAL, interval)) for title, expr in found]


def rule_queries() -> list[Query]:
    return [Query(rule["alert"], rule["expr"]) for rule in alert_rules()]


def parsed(expr: str) -> list[promql_parser.Expr]:
    """`expr` and all that it is made of.

    Raises:
        ValueError: it is no PromQL.
    """
    found: list[promql_parser.Expr] = []
    promql_parser.walk(promql_parser.parse(expr), pre_visit=found.append)
    return found


def selectors(expr: str) -> Iterator[Selector]:
    """What it reads, each in turn."""
    for part in parsed(expr):
        if isinstance(part, promql_parser.VectorSelector):
            assert part.name is not None, f"a selector without a name: {expr}"
            yield Selector(part.name, frozenset(each.name for each in part.matchers.matchers))


def grouping_labels(expr: str) -> set[str]:
    """After `by`."""
    return {
        label
        for part in parsed(expr)
        if isinstance(part, promql_parser.AggregateExpr) and part.modifier is not None
        for label in part.modifier.labels
    }
