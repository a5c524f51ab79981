"""Options that `demo`, `up` and the daemon share."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from triptych_cli.roles import Bounds, RoleCounts, TopologyName
from triptych_cli.settings import DEFAULT_MODEL, LOOPBACK
from triptych_common.cores.plan import CorePolicy

REDIS_URL_VARIABLE = "TRIPTYCH_REDIS_URL"


def parse_bounds(text: str) -> Bounds:
    """Parse `2` or `0..3`, as Typer calls it."""
    try:
        return Bounds.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


Model = Annotated[str, typer.Option(help="Model folder, or a name on the model hub.")]
LocalEncode = Literal["off", "fallback", "auto"]

Encoders = Annotated[int | None, typer.Option(min=0, help="Number of encoders.")]
EncoderBounds = Annotated[
    Bounds | None,
    typer.Option(
        "--encoders",
        parser=parse_bounds,
        metavar="N|MIN..MAX",
        show_default="1; 0 where all that prefill have vision towers of their own",
        help="Number of encoders; 0..3: as many of these as there is work for.",
    ),
]
LocalEncodeOption = Annotated[
    LocalEncode | None,
    typer.Option(
        "--local-encode",
        show_default="off, or as TRIPTYCH_LOCAL_ENCODE says",
        help="Vision towers in the prefill_decode instances: off; fallback, where encoders fail; auto, also "
        "where an instance is quicker.",
    ),
]
PrefillDecodes = Annotated[
    int | None, typer.Option("--prefill-decodes", min=0, help="Number of prefill_decode instances.")
]
PrefillDecodeBounds = Annotated[
    Bounds | None,
    typer.Option(
        "--prefill-decodes",
        parser=parse_bounds,
        metavar="N|MIN..MAX",
        show_default="1, or 0 where other instances answer",
        help="Number of prefill_decode instances; 1..3: as many of these as there is work for.",
    ),
]
Prefills = Annotated[
    int, typer.Option("--prefills", min=0, help="Number of instances that prefill for those that decode.")
]
Decodes = Annotated[
    int, typer.Option("--decodes", min=0, help="Number of instances that decode what others have prefilled.")
]
EncodePrefills = Annotated[
    int,
    typer.Option("--encode-prefills", min=0, help="Number of instances that encode and prefill for others."),
]
EncodePrefillDecodes = Annotated[
    int,
    typer.Option("--encode-prefill-decodes", min=0, help="Number of instances that do all of it themselves."),
]
TopologyOption = Annotated[
    TopologyName | None,
    typer.Option("--topology", help="One engine for each part; e: encode, p: prefill, d: decode."),
]
Gateways = Annotated[
    int | None,
    typer.Option(
        min=0,
        show_default="1; 0 with --join",
        help="Number of gateways, on ports of their own from --port on.",
    ),
]
RedisUrl = Annotated[
    str | None,
    typer.Option(
        envvar=REDIS_URL_VARIABLE,
        help="Use this Redis (redis://, rediss:// or unix://) instead of the embedded one.",
    ),
]
Port = Annotated[int, typer.Option(min=1, max=65535, help="The gateway's port.")]
RegionBytes = Annotated[
    int | None,
    typer.Option(
        min=1 << 20, show_default="256 MiB, less on a small tmpfs", help="Bytes of shared memory for tensors."
    ),
]
EncoderArgs = Annotated[
    str, typer.Option(help='Passed through to the encoders\' vLLM, e.g. "--max-model-len 4096".')
]
PrefillDecodeArgs = Annotated[str, typer.Option(help="Passed through to the vLLM of all other engines.")]
CorePolicyOption = Annotated[
    CorePolicy,
    typer.Option(
        "--core-policy",
        envvar="TRIPTYCH_CORE_POLICY",
        help="How engines share the CPU's cores, or a GPU under MPS: split: each has its part; text_first: "
        "what is idle is lent; image_first: images take from text too.",
    ),
]

Join = Annotated[
    str | None,
    typer.Option(
        metavar="REDIS_URL|FOLDER",
        help="Become a host of a system that runs elsewhere: its Redis, or the folder `join` that its first "
        "host has made. What is not asked for is not started; by default one encoder and one "
        "prefill_decode.",
    ),
]
Fabric = Annotated[
    bool, typer.Option("--fabric", help="Be one of several hosts: start a fabric agent beside the store.")
]
FabricHost = Annotated[
    str | None,
    typer.Option(
        show_default="127.0.0.1; with --join the one from which Redis is reached",
        help="Address of this machine at which the other hosts reach it; implies --fabric.",
    ),
]
FabricPort = Annotated[
    int,
    typer.Option(
        min=1,
        max=65535,
        help="The agent's port; what else the other hosts reach here listens on the ports after it.",
    ),
]
FabricKeyFile = Annotated[
    Path | None,
    typer.Option(
        envvar="TRIPTYCH_FABRIC_KEY_FILE",
        show_default="that of the folder `join`; the first host makes it",
        help="The key that all hosts share.",
    ),
]
HostName = Annotated[
    str | None,
    typer.Option("--host", show_default="the machine's", help="Name of this host, unique in the system."),
]
RedisPort = Annotated[
    int, typer.Option(min=1, max=65535, help="Of the embedded Redis at --fabric-host, for the other hosts.")
]

DEFAULT_MODEL_TEXT = str(DEFAULT_MODEL)
DEFAULT_PORT = 8000
DEFAULT_FABRIC_PORT = 7420
DEFAULT_REDIS_PORT = 6379


@dataclass(frozen=True)
class HostOptions:
    """Options of one host of several, as the user gave them."""

    fabric: bool = False  # it is one of several hosts
    joins: bool = False  # another one has been there before; implies `fabric`
    host: str | None = None  # its name; None: the machine's
    fabric_host: str | None = None  # address; None: found out
    fabric_port: int = DEFAULT_FABRIC_PORT
    fabric_key_file: str | None = None
    redis_port: int = DEFAULT_REDIS_PORT


@dataclass(frozen=True)
class SystemOptions:
    model: str
    encoders: int | None  # most; None: as many as the others need
    prefill_decodes: int | None  # most
    redis_url: str | None
    port: int
    region_bytes: int | None
    encoder_args: str
    prefill_decode_args: str
    gateway_host: str = LOOPBACK
    gateways: int | None = None  # None: one, but none where a system is joined
    core_policy: CorePolicy = "text_first"
    local_encode: LocalEncode | None = None  # None: as the environment says
    prefills: int = 0
    decodes: int = 0
    encode_prefills: int = 0
    encode_prefill_decodes: int = 0
    hosts: HostOptions = HostOptions()
    min_encoders: int | None = None  # fewest; None: always `encoders`
    min_prefill_decodes: int | None = None

    @property
    def num_gateways(self) -> int:
        """Number of gateways, with its default."""
        return (0 if self.hosts.joins else 1) if self.gateways is None else self.gateways

    def counts(self) -> RoleCounts:
        """Engines by role, with their defaults."""
        if self.hosts.joins and (self.encoders is not None or self.prefill_decodes is not None):
            return self._counts_of(self.encoders or 0, self.prefill_decodes or 0)
        others = self.prefills + self.decodes + self.encode_prefills + self.encode_prefill_decodes
        prefill_decodes = self.prefill_decodes
        if prefill_decodes is None:
            prefill_decodes = 0 if others else 1
        encoders = self.encoders
        if encoders is None:
            encoders = 1 if prefill_decodes or self.prefills else 0
        return self._counts_of(encoders, prefill_decodes)

    def _counts_of(self, encoders: int, prefill_decodes: int) -> RoleCounts:
        return RoleCounts(
            encoders,
            prefill_decodes,
            self.prefills,
            self.decodes,
            self.encode_prefills,
            self.encode_prefill_decodes,
        )

    def argument(self) -> str:
        """Options as one argument for the daemon, without the Redis URL, which can hold a password."""
        return json.dumps({**asdict(self), "redis_url": None})

    @classmethod
    def of_daemon(cls, argument: str, redis_url: str | None) -> "SystemOptions":
        """Options from `argument()` and the Redis URL of the environment."""
        fields = json.loads(argument)
        return cls(**{**fields, "redis_url": redis_url, "hosts": HostOptions(**fields["hosts"])})

    def environment(self) -> dict[str, str]:
        """Options passed to the daemon as environment, which other users cannot read."""
        return {REDIS_URL_VARIABLE: self.redis_url or ""}
