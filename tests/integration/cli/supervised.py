"""A supervisor of one fake service, a process that tests kill: `supervised.py RUN_DIR STATE_DIR PORT`."""

import asyncio
import os
import sys
from pathlib import Path

from triptych_cli.supervisor.state import write_status
from triptych_cli.supervisor.supervisor import Supervisor, ended_by_signals, run_directory
from triptych_cli.system.layout import RunLayout
from triptych_cli.system.resolved_options import ResolvedOptions
from triptych_cli.system.topology import HttpReady, ServiceSpec, Topology

FAKE_SERVICE = Path(__file__).parent / "fake_service.py"


async def run(layout: RunLayout, port: int) -> None:
    spec = ServiceSpec(
        name="one",
        argv=(sys.executable, "-S", str(FAKE_SERVICE), str(port), "--child", "--ignore-sigterm"),
        ready=HttpReady(f"http://127.0.0.1:{port}/"),
        start_timeout_s=10.0,
        stop_timeout_s=0.5,
    )
    with run_directory(layout):
        supervisor = Supervisor(
            Topology((spec,), "http://x/v1"),
            layout,
            ResolvedOptions(model="m", model_is_local=False, gateway_port=1),
            env=dict(os.environ),
            cwd=layout.state_dir,
            on_change=lambda status: write_status(layout.state_file, status),
        )
        with ended_by_signals(supervisor):
            async with supervisor.running():
                sys.stdout.write("ready\n")
                sys.stdout.flush()
                await asyncio.Event().wait()


if __name__ == "__main__":
    try:
        asyncio.run(run(RunLayout(Path(sys.argv[1]), Path(sys.argv[2])), int(sys.argv[3])))
    except asyncio.CancelledError:
        sys.exit(0)
