"""Real engines on two hosts: encoder here, prefill_decode and gateway there; Redis on a third host."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.fast.redis_inspection import registered_records
from tests.support.hosts.control_redis import ControlRedis, control_redis
from tests.support.hosts.layout import CONTROL, FABRIC_PORT, KEY
from tests.support.hosts.network import Network
from tests.support.leftovers import store_leftovers
from tests.support.process_ends import end_group
from tests.support.real.system import EXACT, MODEL, SPANS_TIMEOUT_S, START_TIMEOUT_S, Server
from tests.support.real.warm.preload import ENVIRONMENT
from tests.support.stores import stats_of
from tests.support.waiting import wait_until
from triptych_common.telemetry.span_records import SpanRecord
from triptych_common.telemetry.trace_reader import read_trace

DEPLOYMENT = "hosts"
PORT = 8000
SERVICES = {
    "a": {"cache_store": "store-a", "fabric": "fabric-a", "encoder": "encoder-a-0"},
    "b": {
        "cache_store": "store-b", "fabric": "fabric-b", "prefill_decode": "prefill_decode-b-0",
        "gateway": "gateway-b-0",
    },
}  # fmt: skip
"""By host: the instance of each service."""


@dataclass(frozen=True)
class RealHosts(Server):
    """They run."""

    network: Network
    folder: Path

    def trace(self, request_id: str, *names: str) -> list[SpanRecord]:
        """The spans of a request, of all hosts; waits until spans called `names` are among them."""
        found: list[SpanRecord] = []

        def is_complete() -> bool:
            found[:] = read_trace(self.folder / "traces", request_id)
            return any(span.is_root for span in found) and set(names) <= {span.name for span in found}

        wait_until(is_complete, SPANS_TIMEOUT_S, f"spans {names} of {request_id}")
        return found

    def leftovers(self) -> dict[str, int]:
        """Of both stores; empty: nothing."""
        found: dict[str, int] = {}
        for host in SERVICES:
            left = store_leftovers(stats_of(self.folder / host / "store.sock"))
            found |= {f"{host} {what}": number for what, number in left.items() if number}
        return found


@contextmanager
def running_real_hosts() -> Iterator[RealHosts]:
    """Everything is registered; gone at the end."""
    with ExitStack() as stack:
        base = "/dev/shm" if Path("/dev/shm").is_dir() else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="triptych-hosts-", dir=base)))
        network = stack.enter_context(Network([*SERVICES, CONTROL]))
        server = stack.enter_context(control_redis(network[CONTROL]))
        key_file = folder / "fabric.key"
        key_file.touch(mode=0o600)
        key_file.write_text(KEY)
        processes: dict[str, subprocess.Popen[bytes]] = {}
        stack.callback(_end, processes)
        for service in ("cache_store", "fabric", "encoder", "prefill_decode", "gateway"):
            for host, instances in SERVICES.items():
                if service not in instances:
                    continue
                run_dir = folder / host
                run_dir.mkdir(mode=0o700, exist_ok=True)
                package = "cache_store" if service == "fabric" else service
                command = [sys.executable, "-m", f"triptych_{package}"]
                command += ["fabric"] if service == "fabric" else []
                env = _environment(network, server, folder, host, service)
                name = instances[service]
                processes[name] = network[host].start(command, folder / f"{name}.log", env)
            if service == "cache_store":
                for host in SERVICES:
                    wait_until((folder / host / "store.sock").exists, START_TIMEOUT_S, f"a store on {host}")
        _wait_registered(server, processes, folder)
        yield RealHosts(f"http://{network['b'].address}:{PORT}/v1", network, folder)


def _environment(
    network: Network, server: ControlRedis, folder: Path, host: str, service: str
) -> Mapping[str, str]:
    address = str(network[host].address)
    own = {
        "cache_store": {"TRIPTYCH_REGION_BYTES": str(64 << 20)},
        "fabric": {
            "TRIPTYCH_FABRIC_LISTEN_HOST": address,
            "TRIPTYCH_FABRIC_PORT": str(FABRIC_PORT),
            "TRIPTYCH_FABRIC_KEY_FILE": str(folder / "fabric.key"),
            "TRIPTYCH_FABRIC_TRANSPORTS": '["tcp"]',  # UCX takes namespaces of one machine for one host
        },
        "encoder": {"TRIPTYCH_MODEL": str(MODEL), "TRIPTYCH_ENGINE_ARGS": json.dumps(EXACT)},
        "prefill_decode": {
            "TRIPTYCH_MODEL": str(MODEL),
            "TRIPTYCH_ENGINE_ARGS": json.dumps(EXACT),
            "TRIPTYCH_HOST": address,
        },
        "gateway": {"TRIPTYCH_HOST": address, "TRIPTYCH_PORT": str(PORT)},
    }[service]
    return {
        **os.environ,
        **ENVIRONMENT,
        "TRIPTYCH_REDIS_URL": server.service_url,
        "TRIPTYCH_DEPLOYMENT": DEPLOYMENT,
        "TRIPTYCH_RUN_DIR": str(folder / host),
        "TRIPTYCH_TRACES_DIR": str(folder / "traces"),
        "TRIPTYCH_HOST_NAME": host,
        "TRIPTYCH_INSTANCE": SERVICES[host][service],
        **own,
    }


def _wait_registered(
    server: ControlRedis, processes: Mapping[str, "subprocess.Popen[bytes]"], folder: Path
) -> None:
    expected = {name for name in processes if not name.startswith("store")}

    def are_registered() -> bool:
        for name, process in processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended:\n{(folder / f'{name}.log').read_text()[-3000:]}")
        return registered_records(server.url, DEPLOYMENT, expected).keys() == expected

    wait_until(are_registered, START_TIMEOUT_S, "every service is registered")


def _end(processes: dict[str, "subprocess.Popen[bytes]"]) -> None:
    """The stores last."""
    for process in reversed(processes.values()):
        end_group(process)
