"""Prepares a launch: inspects the machine, plans, and builds the supervisor from the options."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from triptych_cli.options import SystemOptions
from triptych_cli.settings import caller_environment
from triptych_cli.supervisor.supervisor import OnChange, Supervisor
from triptych_cli.system.layout import RunLayout
from triptych_cli.system.machine import free_ports, redis_server, resolve
from triptych_cli.system.resolved_options import HostPlan, HostPorts, ResolvedOptions
from triptych_cli.system.shared_secrets import (
    URL_FILE_NAME,
    ensure_key,
    ensure_password,
    redis_config,
    tcp_url,
    write_private,
)
from triptych_cli.system.topology import plan


@dataclass(frozen=True)
class Launch:
    """Everything that is needed to start a system."""

    options: ResolvedOptions
    layout: RunLayout
    env: Mapping[str, str] = field(default_factory=caller_environment, repr=False)
    """Environment that the services inherit."""

    def supervisor(self, on_change: OnChange) -> Supervisor:
        """Build the supervisor, in a running event loop.

        Raises:
            LaunchError: no redis-server is to be found.
            SharedSecretError: what the hosts share cannot be written.
        """
        options, host = self.options, self.options.host
        counts = options.counts
        num_models, num_kv = len(counts.language_models()), counts.num_handing_over
        run_dir = str(self.layout.run_dir)
        metrics_ports = free_ports(1 + counts.encoders + (host is not None), of=f"{run_dir} metrics")
        if host is None:
            ports = free_ports(num_models + num_kv, but=metrics_ports, of=f"{run_dir} engines")
            reached = HostPorts((), tuple(ports[:num_models]), tuple(ports[num_models:]))
        else:
            reached = host.ports(options.num_gateways, num_models, num_kv)
        topology = plan(
            options,
            self.layout,
            prefill_decode_ports=reached.language_models,
            metrics_ports=metrics_ports,
            kv_ports=reached.kv,
            gateway_ports=reached.gateways,
            python=sys.executable,
            redis_server=redis_server() if options.redis_url is None else "",
            redis_password=self._share(host) if host is not None else None,
        )
        return Supervisor(
            topology, self.layout, self.options, env=self.env, cwd=self.layout.state_dir, on_change=on_change
        )

    def _share(self, host: HostPlan) -> str | None:
        """Create the files that other hosts need to join, if they are missing.

        Returns:
            The password of the embedded Redis, if that is the system's.
        """
        layout, redis_url, password = self.layout, self.options.redis_url, None
        if host.key_file is not None:
            ensure_key(host.key_file)
        if host.redis_port is not None:
            password = ensure_password(layout.join_dir, host.address, host.redis_port)
            write_private(layout.redis_config, redis_config(password))
            redis_url = tcp_url(host.address, host.redis_port, password)
        if redis_url is not None:
            write_private(layout.join_dir / URL_FILE_NAME, f"{redis_url}\n")
        return password


def prepare(options: SystemOptions, layout: RunLayout, *, deployment: str) -> Launch:
    """Plan the launch; raises LaunchError if it cannot run here, with nothing changed."""
    return Launch(resolve(options, layout, deployment=deployment), layout)
