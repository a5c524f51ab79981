"""ServingStage: the stage of a request that an instance serves."""

from enum import StrEnum


class ServingStage(StrEnum):
    """Stage of a request that an instance serves."""

    WHOLE = "whole"  # prefill and decode
    PREFILL = "prefill"  # its KV cache is kept for an instance that decodes
    DECODE = "decode"  # from a KV cache that another instance has made
