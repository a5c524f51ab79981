"""Options of vLLM's that an instance cannot be started with: as parsed, however they were spelled."""

from typing import Any

from triptych_common.domain.errors import TriptychError


class UnsupportedOptionError(TriptychError):
    """An option that would break what the instances have agreed on."""


def check_engine_options(args: Any) -> None:
    """Check the parsed arguments of an encoder or a prefill_decode.

    Raises:
        UnsupportedOptionError: the message names the option.
    """
    if (args.media_io_kwargs or {}).get("image"):
        # vLLM folds them into an item's identity, also when the gateway has named it: none would be found.
        raise UnsupportedOptionError(
            "--media-io-kwargs cannot be set for images: take `image` out of it. "
            "Requests can set options that TRIPTYCH_REQUEST_IMAGE_OPTIONS lists"
        )
