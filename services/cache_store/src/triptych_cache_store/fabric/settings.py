"""Settings of the fabric agent, from `TRIPTYCH_*` and the command line."""

from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt

from triptych_cache_store.fabric.wire.keys import Credentials, FabricKeyError, load_credentials
from triptych_common.protocol.messages import FabricTransport
from triptych_common.protocol.urls import ANY_ADDRESSES, HostText
from triptych_common.runtime import MetricsSettings, ServiceSettings


class FabricSettings(ServiceSettings, MetricsSettings):
    """Settings of the fabric agent; without a key and without certificates it does not start."""

    config_section = "fabric"

    instance: str = Field(default="fabric-0", description="name of this agent, unique in the deployment")
    fabric_transports: tuple[FabricTransport, ...] = Field(
        default=(FabricTransport.TCP,),
        min_length=1,
        description="how entries travel, best first, as a JSON list: tcp, nixl, redis",
    )
    fabric_listen_host: HostText = Field(
        default="127.0.0.1", description="address to listen on for other agents"
    )
    fabric_port: int = Field(default=7420, ge=1, le=65535, description="... at this port")
    fabric_advertise_host: HostText | None = Field(
        default=None, description="how other agents reach it [default: FABRIC_LISTEN_HOST]"
    )
    fabric_key_file: Path | None = Field(
        default=None, description="shared key of all agents: a file of 32 bytes or more, mode 0600"
    )
    fabric_tls_cert_file: Path | None = Field(
        default=None, description="certificate of this agent, PEM; with the next two: mutual TLS"
    )
    fabric_tls_key_file: Path | None = Field(default=None, description="its private key, PEM, mode 0600")
    fabric_tls_ca_file: Path | None = Field(
        default=None, description="CA of the fabric, PEM: whoever it has signed belongs to the fabric"
    )
    fabric_max_bytes_in_flight: PositiveInt = Field(
        default=256 << 20, description="reserved for entries of other stores that are not sealed yet"
    )
    fabric_max_rate: PositiveFloat | None = Field(
        default=None, description="bytes a second that this agent sends [default: as many as go]"
    )
    fabric_progress_timeout_s: PositiveFloat = Field(
        default=5.0, description="a peer that is silent for so long, or not reached, is unreachable"
    )

    def model_post_init(self, context: Any) -> None:
        """Refuse an address that other hosts cannot connect to."""
        super().model_post_init(context)
        if len(set(self.fabric_transports)) < len(self.fabric_transports):
            raise ValueError("fabric_transports names one twice")
        if self.listens and self.advertised_host in ANY_ADDRESSES:
            raise ValueError("fabric_advertise_host is needed: other agents cannot call all addresses")

    @property
    def listens(self) -> bool:
        """True if a TCP port is opened; otherwise other agents connect through Redis only."""
        return self.fabric_transports != (FabricTransport.REDIS,)

    @property
    def advertised_host(self) -> str:
        return self.fabric_advertise_host or self.fabric_listen_host

    def credentials(self) -> Credentials:
        """Load the credentials; raises FabricKeyError if they are unusable."""
        credentials = load_credentials(
            self.fabric_key_file, self.fabric_tls_cert_file, self.fabric_tls_key_file, self.fabric_tls_ca_file
        )
        if FabricTransport.REDIS in self.fabric_transports and credentials.key is None:
            raise FabricKeyError(
                "the fabric's transport redis needs FABRIC_KEY_FILE: Redis has no certificates"
            )
        return credentials
