"""ServingStage: what of a request an instance is asked for."""

from enum import StrEnum


class ServingStage(StrEnum):
    """What of a request an instance is asked for."""

    WHOLE = "whole"  # prefill and decode
    PREFILL = "prefill"  # its KV cache is kept for an instance that decodes
    DECODE = "decode"  # from a KV cache that another instance has made
