"""`seam`, the module of `seams` for the installed version of vLLM. A version that is not supported gets the
nearest one: `versions.vllm_version` refuses it at the start, with a message."""

from triptych_vllm_connector.versions import is_before_0_33

if is_before_0_33():
    from triptych_vllm_connector.seams import vllm_0_32 as seam
else:
    from triptych_vllm_connector.seams import vllm_0_33 as seam  # type: ignore[no-redef]

__all__ = ["seam"]
