"""Namespace digest: everything that must be equal for one engine's embeddings to be valid in another.

Weights, configuration, processor, dtype, vLLM's version, and the form of items' records. Engines announce it
when they register; the gateway folds it into every mm_hash and pairs only engines that agree.

It is made of what vLLM understood, not of what was written: vLLM's own parser reads the options, vLLM's
`ModelConfig` resolves the model, and of both only what changes an encoder's output counts (`RESULT_FIELDS`).
No engine is started and no GPU is used.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from blake3 import blake3

from triptych_common.domain.errors import TriptychError
from triptych_common.domain.hashing import namespace_digest
from triptych_common.protocol.item_record import RECORD_VERSION
from triptych_vllm_connector.host.engine_options import parse_options
from triptych_vllm_connector.versions import vllm_version

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


# Fields of vLLM's `AsyncEngineArgs` that change an encoder's output: engines that differ in one never share a
# tensor. What belongs to one role, to its sizes or to its speed does not count.
# `tests/unit/vllm_connector/host/test_namespace.py` fails for a field that neither list names.
IDENTITY_FIELDS = frozenset(
    {
        "model",
        "model_weights",  # where object storage has the weights
        "revision",
        "code_revision",
        "hf_config_path",
        "config_format",
        "hf_overrides",
        "trust_remote_code",  # whose code builds the model and its processor
        "model_impl",
        "model_class_overrides",
    }
)
"""Fields that identify the model: its files, its configuration, its code."""

NUMERIC_FIELDS = frozenset(
    {
        "dtype",
        "quantization",
        "quantization_config",
        "load_format",
        "model_loader_extra_config",
        "ignore_patterns",  # which files of weights are left out
        "mm_encoder_attn_backend",
        "mm_encoder_attn_dtype",
        "mm_encoder_fp8_scale_path",  # its content counts
        "enable_tower_connector_lora",
        "default_mm_loras",  # with `enable_tower_connector_lora` only
    }
)
"""Fields that change how it computes. Parallelism and kernels change the rounding as the kind of hardware
does; only the encoder's attention backend is named here, since its operator named it."""

MEDIA_FIELDS = frozenset(
    {
        "media_io_kwargs",
        "mm_processor_kwargs",  # but `device`: where it runs, which only an encoder may choose
        "mm_device_do_normalize",
        "video_pruning_rate",
        "video_pruning_method",
    }
)
"""Fields that change the media before the encoder sees them."""

RESULT_FIELDS = IDENTITY_FIELDS | NUMERIC_FIELDS | MEDIA_FIELDS

ACCESS_FIELDS = frozenset({"hf_token", "download_dir", "allow_deprecated_quantization"})
"""Fields needed to read the configuration, which they do not change."""

SEED_FIELD = "seed"  # counts where weights are made up (`load_format` "dummy")

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

_MADE_UP_WEIGHTS = "dummy"  # a load format
_PLACES = frozenset({"_name_or_path"})  # in a model's configuration: where it lies, not what it is


class EngineOptionsError(TriptychError):
    """vLLM does not take the options, or cannot read the model's configuration."""


def digest_of_model(model: str, engine_args: Sequence[str]) -> str:
    """Digest (64 hex digits) of a model and of the options that change what its encoder puts out.

    Takes half a second beside the import of vLLM, and the time to read the weights' samples.

    Args:
        model: a folder, or a hub name.
        engine_args: options passed through to vLLM, in whatever spelling vLLM takes.

    Raises:
        UnsupportedVLLMError: vLLM is missing, or another version.
        EngineOptionsError: vLLM refuses the options or the model.
        UnresolvedModelError: the commit of a hub model is not known.
    """
    vllm = vllm_version()
    args = parse_engine_options([f"--model={model}", *engine_args])
    config = _model_config(args)
    tower_loras = args.default_mm_loras or {} if args.enable_tower_connector_lora else None
    parts = {
        "vllm": vllm,
        "item_record": str(RECORD_VERSION),
        **_identity_parts(config),
        **_numeric_parts(config, args.create_load_config(), tower_loras, args.seed),
        **_media_parts(config),
    }
    return namespace_digest(parts)


def digest_of_engine(vllm_config: "VllmConfig") -> str:
    """Digest of an engine that a user has started, from its own configuration.

    Not equal to `digest_of_model`: vLLM has completed the configuration by then.

    Raises:
        UnsupportedVLLMError: another version of vLLM.
        UnresolvedModelError: the commit of a hub model is not known.
    """
    config, lora = vllm_config.model_config, vllm_config.lora_config
    has_tower_loras = lora is not None and lora.enable_tower_connector_lora
    tower_loras = (lora.default_mm_loras or {}) if lora is not None and has_tower_loras else None
    parts = {
        "vllm": vllm_version(),
        **_identity_parts(config),
        **_numeric_parts(config, vllm_config.load_config, tower_loras, config.seed),
        **_media_parts(config),
    }
    return namespace_digest(parts)


def parse_engine_options(options: Sequence[str]) -> "AsyncEngineArgs":
    """Parse options as vLLM does.

    Raises:
        EngineOptionsError: vLLM refuses them; its parser has printed the reason.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    try:
        return AsyncEngineArgs.from_cli_args(parse_options(options))
    except SystemExit as error:
        raise EngineOptionsError("vLLM does not take the engine's options; its message is above") from error
    except (ValueError, OSError) as error:
        raise EngineOptionsError(f"vLLM does not take the engine's options: {error}") from error


def _model_config(args: "AsyncEngineArgs") -> "ModelConfig":
    """vLLM's `ModelConfig`, with defaults for fields that must not count."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    counted = {name: getattr(args, name) for name in RESULT_FIELDS | ACCESS_FIELDS}
    try:
        return AsyncEngineArgs(**counted).create_model_config()
    except (ValueError, OSError) as error:  # pydantic's errors and the hub's among them
        raise EngineOptionsError(
            f"vLLM cannot read the configuration of {args.model}: name a folder with a config.json, or a "
            f"model on a hub that can be reached, with HF_TOKEN where it is not public ({error})"
        ) from error


def _identity_parts(config: "ModelConfig") -> dict[str, str]:
    commit = getattr(config.revision, "resolved", None)  # vLLM could resolve it
    return {
        **snapshot_parts(config.model, commit, runs_its_code=config.trust_remote_code),
        "model_weights": config.model_weights,
        "hf_config": _canonical(_without_places(config.hf_config.to_dict())),
        "architecture": config.architecture,
        "trust_remote_code": _canonical(config.trust_remote_code),
        "code_revision": _canonical(config.code_revision),
        "model_impl": _canonical(config.model_impl),
        "model_class_overrides": _canonical(config.model_class_overrides),
    }


def _numeric_parts(
    config: "ModelConfig", load: "LoadConfig", tower_loras: Mapping[str, str] | None, seed: int
) -> dict[str, str]:
    parts = {
        "dtype": str(config.dtype).removeprefix("torch."),
        "quantization": _canonical(config.quantization),
        "quantization_config": _canonical(config.quantization_config),
        "load_format": str(load.load_format),
        "model_loader_extra_config": _canonical(load.model_loader_extra_config),
        "ignore_patterns": _canonical(load.ignore_patterns),
        "tower_loras": _canonical(tower_loras),
    }
    if load.load_format == _MADE_UP_WEIGHTS:
        parts[SEED_FIELD] = str(seed)
    return parts


def _media_parts(config: "ModelConfig") -> dict[str, str]:
    media = config.multimodal_config
    if media is None:
        return {}
    processor = {key: value for key, value in (media.mm_processor_kwargs or {}).items() if key != "device"}
    backend = media.mm_encoder_attn_backend
    scales = media.mm_encoder_fp8_scale_path
    return {
        "mm_processor_kwargs": _canonical(processor),
        "media_io_kwargs": _canonical(media.media_io_kwargs),
        "mm_device_do_normalize": _canonical(media.mm_device_do_normalize),
        "mm_encoder_attn_backend": "" if backend is None else backend.name,
        "mm_encoder_attn_dtype": _canonical(media.mm_encoder_attn_dtype),
        "mm_encoder_fp8_scales": "" if scales is None else file_digest(Path(scales)),
        "video_pruning": _canonical(media.get_video_pruning_spec()),
    }


def _without_places(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_places(each) for key, each in value.items() if key not in _PLACES}
    if isinstance(value, (list, tuple)):
        return [_without_places(each) for each in value]
    return value


def _canonical(value: Any) -> str:
    """JSON with sorted keys.

    Raises:
        EngineOptionsError: an option holds what has no text that is the same in every process.
    """
    try:
        return orjson.dumps(
            value, default=_plain, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS
        ).decode()
    except TypeError as error:
        raise EngineOptionsError(f"an option of the engine cannot be compared: {error}") from error


def _plain(value: Any) -> Any:
    import torch

    if isinstance(value, (torch.dtype, Path)):
        return str(value)
    if isinstance(value, tuple):  # a named one
        return list(value)
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    raise TypeError(type(value).__name__)
