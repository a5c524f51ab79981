"""A real Prometheus, where there is one: on the PATH, or from Debian's package, unpacked for the tests."""

import contextlib
import functools
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.debian_packages import unpacked
from tests.support.observability import RULES
from tests.support.waiting import free_port, wait_until

START_LIMIT_S = 30.0


@dataclass(frozen=True)
class Binaries:
    """The two programs."""

    prometheus: Path
    promtool: Path


def require_binaries() -> Binaries:
    """Skips the test, with the reason, where there are none."""
    try:
        return find_binaries()
    except FileNotFoundError as error:
        pytest.skip(f"no Prometheus here: {error}")


@functools.cache
def find_binaries() -> Binaries:
    """Raises FileNotFoundError, which says what was tried."""
    found = {name: shutil.which(name) for name in ("prometheus", "promtool")}
    if found["prometheus"] and found["promtool"]:
        return Binaries(Path(found["prometheus"]), Path(found["promtool"]))
    folder = unpacked("prometheus") / "usr" / "bin"
    return Binaries(folder / "prometheus", folder / "promtool")


class PrometheusServer:
    """Scrapes targets twice a second, and evaluates the alert rules each second."""

    def __init__(self, folder: Path, targets: Mapping[str, Sequence[str]]) -> None:
        """`targets`: host and port of each, by job."""
        self._folder = folder
        self._num_targets = sum(map(len, targets.values()))
        self._url = f"http://127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None
        config = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": list(each)}]}
                for job, each in targets.items()
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))

    def start(self) -> None:
        """Returns when every target has been scraped."""
        command = [
            str(find_binaries().prometheus),
            f"--config.file={self._folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={self._url.removeprefix('http://')}",
            "--log.level=warn",
        ]
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(self._has_scraped_all, START_LIMIT_S, f"scrapes of {self._num_targets} targets")

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=10)

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Samples of `expr` now; fails the test where it cannot be evaluated."""
        answer = httpx.post(f"{self._url}/api/v1/query", data={"query": expr}, timeout=10, trust_env=False)
        body = answer.json()
        assert body["status"] == "success", f"{expr}: {body.get('error', answer.text)}"
        result = body["data"]["result"]
        return list(result) if body["data"]["resultType"] == "vector" else [{"value": result}]

    def value(self, expr: str) -> float:
        """Of the first sample; 0: there is none."""
        return float(next((each["value"][1] for each in self.query(expr)), 0.0))

    def rules(self) -> list[dict[str, Any]]:
        """What has come of each rule."""
        answer = httpx.get(f"{self._url}/api/v1/rules", timeout=10, trust_env=False).json()
        return [rule for group in answer["data"]["groups"] for rule in group["rules"]]

    def wait_for(self, expr: str, least: float, limit_s: float = 20.0) -> None:
        """Until the value of `expr` is `least` or more."""
        wait_until(lambda: self.value(expr) >= least, limit_s, f"{expr} >= {least}")

    def wait_for_rules(self) -> None:
        """Until each has been evaluated on what is scraped by now."""
        now = time.time()

        def are_new() -> bool:
            return all(_unix_s(rule["lastEvaluation"]) > now for rule in self.rules())

        wait_until(are_new, START_LIMIT_S, "every rule is evaluated")

    def _has_scraped_all(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            pytest.fail(f"prometheus has ended: {(self._folder / 'prometheus.log').read_text()[-2000:]}")
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):  # it starts
            return self.value("sum(up)") >= self._num_targets
        return False


def _unix_s(text: str) -> float:
    """Of a time as Prometheus' API has it; it may have nanoseconds."""
    return datetime.fromisoformat(text).timestamp()


@contextlib.contextmanager
def running_prometheus(targets: Mapping[str, Sequence[str]]) -> Iterator[PrometheusServer]:
    """Gone at the end, with all that it has stored."""
    require_binaries()
    with (
        tempfile.TemporaryDirectory(prefix="triptych-prometheus-") as name,
        closing(PrometheusServer(Path(name), targets)) as server,
    ):
        server.start()
        yield server
