"""Files of a model: the digest of a local folder, or the commit of a hub model."""

import re
from pathlib import Path

from blake3 import blake3

from triptych_common.domain.errors import TriptychError

_WHOLE_FILE_BYTES = 64 << 20  # larger files are sampled: a digest of 100 GB would double the start
_SAMPLE_BYTES = 1 << 20
_NUM_SAMPLES = 64
_PATTERNS = (
    "config.json",
    "params.json",
    "*processor_config.json",
    "*quant*config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
)
_CODE_PATTERN = "*.py"
_HUB_FOLDER = re.compile(r"models--(?P<model>.+)/snapshots/(?P<commit>[0-9a-f]{40})")  # of the hub's cache


class UnresolvedModelError(TriptychError):
    """The commit of a hub model is unknown, and equal names do not mean equal weights."""


def snapshot_parts(model: str, commit: str | None, *, runs_its_code: bool) -> dict[str, str]:
    """Identity of the model's files, as parts of a digest.

    Args:
        model: a folder, a file, or a hub name.
        commit: of a hub model; None: not known.
        runs_its_code: Python files in a local folder count, too.

    Raises:
        UnresolvedModelError: a hub model without a commit.
    """
    path = Path(model)
    if path.is_file():
        return {"file": file_digest(path)}
    hub_folder = _HUB_FOLDER.fullmatch("/".join(path.parts[-3:]))
    if hub_folder is not None and path.is_dir():  # offline vLLM takes the folder for the hub's name
        return _hub_parts(hub_folder["model"].replace("--", "/"), hub_folder["commit"])
    if path.is_dir():
        patterns = (*_PATTERNS, _CODE_PATTERN) if runs_its_code else _PATTERNS
        found = {file for pattern in patterns for file in path.glob(pattern)}
        return {f"file:{file.name}": file_digest(file) for file in found}
    if commit is None:
        raise UnresolvedModelError(
            f"model {model} is no local folder, and its commit on the hub is not known: it is not in the"
            " local cache, or the hub cannot be reached. Give --revision=<commit>, or a folder"
        )
    return _hub_parts(model, commit)


def _hub_parts(model: str, commit: str) -> dict[str, str]:
    return {"model": model, "commit": commit}


def file_digest(path: Path) -> str:
    """Digest of a file's content, equal for copies of it."""
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
