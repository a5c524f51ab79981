"""From the given options to a supervisor: inspects the machine, then plans."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from triptych_cli.options import SystemOptions
from triptych_cli.settings import caller_environment
from triptych_cli.supervisor.supervisor import OnChange, Supervisor
from triptych_cli.system.layout import RunLayout
from triptych_cli.system.machine import free_ports, redis_server, resolve
from triptych_cli.system.resolved_options import ResolvedOptions
from triptych_cli.system.topology import plan


@dataclass(frozen=True)
class Launch:
    """Everything that is needed to start a system."""

    options: ResolvedOptions
    layout: RunLayout
    env: Mapping[str, str] = field(default_factory=caller_environment, repr=False)
    """What the services inherit."""

    def supervisor(self, on_change: OnChange) -> Supervisor:
        """To be called in a running event loop.

        Raises:
            LaunchError: no redis-server is to be found.
        """
        counts = self.options.counts
        num_engine_ports = len(counts.language_models())
        num_metrics_ports = 1 + counts.encoders
        ports = free_ports(num_engine_ports + num_metrics_ports + counts.num_handing_over)
        topology = plan(
            self.options,
            self.layout,
            prefill_decode_ports=ports[:num_engine_ports],
            metrics_ports=ports[num_engine_ports : num_engine_ports + num_metrics_ports],
            kv_ports=ports[num_engine_ports + num_metrics_ports :],
            python=sys.executable,
            redis_server=redis_server() if self.options.redis_url is None else "",
        )
        return Supervisor(
            topology, self.layout, self.options, env=self.env, cwd=self.layout.state_dir, on_change=on_change
        )


def prepare(options: SystemOptions, layout: RunLayout, *, deployment: str) -> Launch:
    """Raises LaunchError when the system cannot run here so; nothing was changed."""
    return Launch(resolve(options, layout, deployment=deployment), layout)
