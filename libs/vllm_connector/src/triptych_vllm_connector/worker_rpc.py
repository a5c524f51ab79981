"""Methods of our worker classes that hosts call by name (`collective_rpc`)."""

from typing import Any

from vllm.distributed.ec_transfer.ec_connector.encoder_output_width import _measure_on_worker

ENCODER_WIDTHS = "triptych_encoder_widths"


class WorkerRpc:
    """Mixin of the worker classes."""

    def triptych_encoder_widths(self: Any) -> dict[str, int]:
        """Columns of the encoder's output, by modality, measured on a dummy item; {} without an encoder."""
        widths: dict[str, int] = _measure_on_worker(self)
        return widths
