"""Options that `demo`, `up` and the daemon share."""

from dataclasses import dataclass
from typing import Annotated

import typer

from triptych_cli.settings import DEFAULT_MODEL

REDIS_URL_VARIABLE = "TRIPTYCH_REDIS_URL"

Model = Annotated[str, typer.Option(help="Model folder, or a name on the model hub.")]
Encoders = Annotated[int, typer.Option(min=1, help="Number of encoders.")]
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

    def arguments(self) -> list[str]:
        """As command line words, for the daemon; without the Redis URL, which can hold a password."""
        words = [
            f"--model={self.model}",
            f"--encoders={self.encoders}",
            f"--prefill-decodes={self.prefill_decodes}",
            f"--gateways={self.gateways}",
            f"--port={self.port}",
            f"--encoder-args={self.encoder_args}",
            f"--prefill-decode-args={self.prefill_decode_args}",
        ]
        if self.region_bytes is not None:
            words.append(f"--region-bytes={self.region_bytes}")
        return words

    def environment(self) -> dict[str, str]:
        """What of it is handed to the daemon as environment, which other users cannot read."""
        return {REDIS_URL_VARIABLE: self.redis_url or ""}
