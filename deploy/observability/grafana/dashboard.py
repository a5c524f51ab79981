"""Makes the Grafana dashboard of panels.yaml: dashboards/triptych.json, which Grafana is provisioned with.

    python deploy/observability/grafana/dashboard.py

Run it after a change of panels.yaml; a test compares the two. panels.yaml says what its keys mean.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent
PANELS, DASHBOARD = FOLDER / "panels.yaml", FOLDER / "dashboards" / "triptych.json"
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
COLUMNS, WIDTH, HEIGHT = 24, 8, 7
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
KEYS = frozenset({"title", "unit", "stack", "queries", "quantiles", "rates", "gauges", "how", "by"})


class PanelError(ValueError):
    """A panel has a key that there is not, or shows nothing."""


def dashboard(described: dict[str, Any]) -> dict[str, Any]:
    """Grafana's JSON model of what panels.yaml holds.

    Raises:
        PanelError: a panel is not as it must be.
    """
    return {
        "uid": described["uid"],
        "title": described["title"],
        "tags": ["triptych"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource_variable()]},
        "annotations": {"list": []},
        "panels": list(_panels(described["rows"])),
    }


def expressions(model: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Title of the panel, and PromQL, of all queries of a dashboard."""
    for panel in model["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def text_of(model: dict[str, Any]) -> str:
    return json.dumps(model, indent=1, ensure_ascii=False) + "\n"


def _panels(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    number, y = 0, 0
    for row in rows:
        number += 1
        yield {
            "id": number, "type": "row", "title": row["title"], "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
        }  # fmt: skip
        y += 1
        for place, panel in enumerate(row["panels"]):
            number += 1
            x = place * WIDTH % COLUMNS
            y += HEIGHT if place and not x else 0
            yield _panel(panel, number, {"x": x, "y": y, "w": WIDTH, "h": HEIGHT})
        y += HEIGHT


def _panel(panel: dict[str, Any], number: int, place: dict[str, int]) -> dict[str, Any]:
    queries = list(_queries(panel))
    if unknown := panel.keys() - KEYS:
        raise PanelError(f"{panel['title']}: there is no {', '.join(sorted(unknown))}")
    if not queries:
        raise PanelError(f"{panel['title']}: it shows nothing")
    custom = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never", "spanNulls": True}
    if panel.get("stack"):
        custom |= {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 40}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel["title"],
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.get("unit", "short"), "min": 0, "custom": custom},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for place, (expr, legend) in enumerate(queries)
        ],
    }


def _queries(panel: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """PromQL and legend of each line, or group of lines."""
    by = panel.get("by", [])
    yield from ((each["expr"], each["legend"]) for each in panel.get("queries", []))
    if (histogram := panel.get("quantiles")) is not None:
        labels = ", ".join(["le", *by])
        for name, bound in QUANTILES.items():
            buckets = f"sum by ({labels}) (rate({histogram}_bucket[$__rate_interval]))"
            yield f"histogram_quantile({bound}, {buckets})", _legend(name, by)
    rates = panel.get("rates", {})
    for counter, labels_of in rates.items():
        grouping = f" by ({', '.join(labels_of)}) " if labels_of else ""
        name = _short(counter) if len(rates) > 1 or not labels_of else ""
        yield f"sum{grouping}(rate({counter}[$__rate_interval]))", _legend(name, labels_of)
    gauges = panel.get("gauges", [])
    for gauge in gauges:
        grouping = f" by ({', '.join(by)}) " if by else ""
        name = _short(gauge) if len(gauges) > 1 or not by else ""
        yield f"{panel.get('how', 'sum')}{grouping}({gauge})", _legend(name, by)


def _legend(name: str, labels: list[str]) -> str:
    return " ".join([*([name] if name else []), *(f"{{{{{label}}}}}" for label in labels)])


def _short(metric: str) -> str:
    """Without the service and the unit: `jobs sent again` of its counter."""
    words = metric.partition(":")[2].split("_") if ":" in metric else metric.split("_")[2:]
    return " ".join(words).removesuffix(" total").removesuffix(" seconds").removeprefix("decode ")


def _datasource_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "hide": 0,
    }


def main() -> None:
    DASHBOARD.write_text(text_of(dashboard(yaml.safe_load(PANELS.read_text()))))


if __name__ == "__main__":
    main()
