"""Options that `demo`, `up` and the daemon share."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import typer

from triptych_cli.settings import DEFAULT_MODEL
from triptych_common.cores.plan import CorePolicy

REDIS_URL_VARIABLE = "TRIPTYCH_REDIS_URL"

Model = Annotated[str, typer.Option(help="Model folder, or a name on the model hub.")]
LocalEncode = Literal["off", "fallback", "auto"]

Encoders = Annotated[int, typer.Option(min=1, help="Number of encoders.")]
EncodersOrNone = Annotated[int, typer.Option(min=0, help="Number of encoders; 0 with --local-encode alone.")]
LocalEncodeOption = Annotated[
    LocalEncode | None,
    typer.Option(
        "--local-encode",
        help="Vision towers in the prefill_decode instances: off; fallback, where encoders fail; auto, also "
        "where an instance is quicker [default: off, or as TRIPTYCH_LOCAL_ENCODE says].",
    ),
]
PrefillDecodes = Annotated[
    int, typer.Option("--prefill-decodes", min=1, help="Number of prefill_decode instances.")
]
Gateways = Annotated[
    int, typer.Option(min=1, help="Number of gateways, on ports of their own from --port on.")
]
RedisUrl = Annotated[
    str | None,
    typer.Option(
        envvar=REDIS_URL_VARIABLE,
        help="Use this Redis (redis://, rediss:// or unix://) instead of the embedded one.",
    ),
]
Port = Annotated[int, typer.Option(min=1, max=65535, help="The gateway's port on 127.0.0.1.")]
RegionBytes = Annotated[
    int | None,
    typer.Option(min=1 << 20, help="Shared memory for tensors [default: 256 MiB, less on a small tmpfs]."),
]
EncoderArgs = Annotated[
    str, typer.Option(help='Passed through to the encoders\' vLLM, e.g. "--max-model-len 4096".')
]
PrefillDecodeArgs = Annotated[str, typer.Option(help="Passed through to the prefill_decode instances' vLLM.")]
CorePolicyOption = Annotated[
    CorePolicy,
    typer.Option(
        "--core-policy",
        envvar="TRIPTYCH_CORE_POLICY",
        help="How engines share the CPU's cores, or a GPU under MPS: split: each has its part; text_first: "
        "what is idle is lent; image_first: images take from text too.",
    ),
]

DEFAULT_MODEL_TEXT = str(DEFAULT_MODEL)
DEFAULT_PORT = 8000


@dataclass(frozen=True)
class SystemOptions:
    """The shared options as they were given."""

    model: str
    encoders: int
    prefill_decodes: int
    redis_url: str | None
    port: int
    region_bytes: int | None
    encoder_args: str
    prefill_decode_args: str
    gateways: int = 1
    core_policy: CorePolicy = "text_first"
    local_encode: LocalEncode | None = None  # None: as the environment says

    def argument(self) -> str:
        """As one command line argument for the daemon; without the Redis URL, which can hold a password."""
        return json.dumps({**asdict(self), "redis_url": None})

    @classmethod
    def of_daemon(cls, argument: str, redis_url: str | None) -> "SystemOptions":
        """From `argument()`, and the Redis URL of the environment."""
        return cls(**{**json.loads(argument), "redis_url": redis_url})

    def environment(self) -> dict[str, str]:
        """What of it is handed to the daemon as environment, which other users cannot read."""
        return {REDIS_URL_VARIABLE: self.redis_url or ""}
