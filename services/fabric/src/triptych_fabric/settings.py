"""Settings of the fabric agent, from `TRIPTYCH_*` and the command line."""

from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt

from triptych_common.protocol.messages import FabricTransport
from triptych_common.protocol.urls import ANY_ADDRESSES, HostText
from triptych_common.runtime import MetricsSettings, ServiceSettings
from triptych_fabric.wire.keys import Credentials, load_credentials


class FabricSettings(ServiceSettings, MetricsSettings):
    """Settings of the fabric agent; without a key and without certificates it does not start."""

    config_section = "fabric"

    instance: str = "fabric-0"
    """Name of this agent, unique in the deployment; `{hostname}` in it is replaced by the host's name."""
    fabric_transports: tuple[FabricTransport, ...] = Field(default=(FabricTransport.TCP,), min_length=1)
    """JSON list of the transports of entries between hosts, best first: `tcp`, `nixl`. The ports of NIXL
    authenticate nobody.
    """
    fabric_listen_host: HostText = "127.0.0.1"
    """Address to listen on for other agents."""
    fabric_port: int = Field(default=7420, ge=1, le=65535)
    """Port to listen on for other agents."""
    fabric_advertise_host: HostText | None = None
    """Name or address at which other agents reach this one. Not set: `fabric_listen_host`."""
    fabric_key_file: Path | None = None
    """File of the key that all agents share: 32 bytes or more, mode 0600. Not set: certificates alone."""
    fabric_tls_cert_file: Path | None = None
    """PEM file of this agent's certificate; with `fabric_tls_key_file` and `fabric_tls_ca_file`: mutual TLS.
    """
    fabric_tls_key_file: Path | None = None
    """PEM file of the certificate's private key, mode 0600."""
    fabric_tls_ca_file: Path | None = None
    """PEM file of the fabric's CA; every agent with a certificate signed by it belongs to the fabric."""
    fabric_max_bytes_in_flight: PositiveInt = 256 << 20
    """Bytes reserved at once for entries of other stores that are not sealed yet."""
    fabric_max_rate: PositiveFloat | None = None
    """Bytes per second that this agent sends at most. Not set: no bound."""
    fabric_progress_timeout_s: PositiveFloat = 5.0
    """Seconds after which a peer that is silent, or cannot be reached, counts as unreachable."""

    def model_post_init(self, context: Any) -> None:
        """Refuse an address that other hosts cannot connect to."""
        super().model_post_init(context)
        if len(set(self.fabric_transports)) < len(self.fabric_transports):
            raise ValueError("fabric_transports names one twice")
        if self.advertised_host in ANY_ADDRESSES:
            raise ValueError("fabric_advertise_host is needed: other agents cannot call all addresses")

    @property
    def advertised_host(self) -> str:
        return self.fabric_advertise_host or self.fabric_listen_host

    def credentials(self) -> Credentials:
        """Load the credentials; raises FabricKeyError if they are unusable."""
        return load_credentials(
            self.fabric_key_file, self.fabric_tls_cert_file, self.fabric_tls_key_file, self.fabric_tls_ca_file
        )
