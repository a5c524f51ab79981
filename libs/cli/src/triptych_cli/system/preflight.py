"""Checks before anything starts: the model, its media, Redis, the region. Imports neither torch nor vLLM."""

import ast
import asyncio
import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from triptych_cli.settings import HubSettings
from triptych_cli.system.machine import LaunchError
from triptych_cli.system.resolved_options import MIB, ResolvedOptions
from triptych_common.bus import AsyncBus
from triptych_common.domain.engine_args import option_value
from triptych_common.domain.errors import TriptychError

HUB_TIMEOUT_S = 10.0
REDIS_TIMEOUT_S = 6.0  # longer than the connection's own retries
CONFIG_FILES = ("config.json", "params.json")  # Hugging Face's, and Mistral's own
FEWEST_ROWS = 2048  # of vLLM's encoder cache: its smallest default of tokens in a step, for a server
LARGEST_ITEM_ROWS = (
    16_384  # of the largest image of a Qwen-VL; a cache also holds one item, if the context does
)
TEXT_MODELS, MEDIA_MODELS = "_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS"  # vLLM's tables
DTYPE_BYTES = {"float32": 4, "float": 4}  # of others 2

ModelConfig = Mapping[str, Any]


def preflight(options: ResolvedOptions) -> None:
    """Check for everything that would make the start fail, or serve nothing, minutes later.

    Raises:
        LaunchError: the text names the remedy.
    """
    if options.redis_url is not None:
        check_redis(options.redis_url, options.deployment)
    config = model_config(options)
    if options.counts.encoders and is_text_only(config):
        raise LaunchError(
            f"{options.model} is a model of text alone ({', '.join(config['architectures'])}), with "
            "nothing to encode: start it with --encoders 0 --local-encode fallback"
        )
    check_region(options, config)


def model_config(options: ResolvedOptions) -> ModelConfig:
    """The model's configuration, from its folder, the hub's cache or the hub; empty if unknown.

    Raises:
        LaunchError: there is no such model, or the hub cannot be reached.
    """
    arguments = (*options.encoder_args, *options.prefill_decode_args)
    if options.model_is_local:
        return _parsed((Path(options.model) / CONFIG_FILES[0]).read_bytes(), options.model)
    return hub_config(
        options.model, option_value(arguments, "--revision") or "main", option_value(arguments, "--hf-token")
    )


def hub_config(model: str, revision: str, token: str | None) -> ModelConfig:
    if ":" in model or HubSettings().vllm_use_modelscope:  # an object store's URL, a GGUF file, another hub
        return {}
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError

    try:
        cached = cached_config(model, revision)
    except HFValidationError:
        raise LaunchError(f"there is no folder {model}, and no model on a hub can have that name") from None
    if cached is not None:
        return cached
    if constants.HF_HUB_OFFLINE:
        raise _unreached(model, "HF_HUB_OFFLINE is set")
    key = token or get_token()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(follow_redirects=True, timeout=HUB_TIMEOUT_S, headers=headers) as client:
            answers = [
                client.get(f"{constants.ENDPOINT}/{model}/resolve/{revision}/{name}") for name in CONFIG_FILES
            ]
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _unreached(model, f"{constants.ENDPOINT}: {str(error) or type(error).__name__}") from None
    if found := next((answer for answer in answers if answer.is_success), None):
        return _parsed(found.content, model)
    raise _refused(model, answers[0])


def cached_config(model: str, revision: str = "main") -> ModelConfig | None:
    """Configuration from the hub's cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    cached = [try_to_load_from_cache(model, name, revision=revision) for name in CONFIG_FILES]
    files = [Path(file) for file in cached if isinstance(file, str)]
    return _parsed(files[0].read_bytes(), model) if files else None


def known_config(model: str) -> ModelConfig:
    """Return the configuration of a model that is being served; empty if it is not on this machine."""
    try:
        if model.startswith("/"):
            return _parsed((Path(model) / CONFIG_FILES[0]).read_bytes(), model)
        return cached_config(model) or {}
    except (LaunchError, OSError, ValueError, ImportError):  # an inspecting container has no hub's client
        return {}


def downloads_of(model: str) -> Path | None:
    """Folder for the downloads of a hub model; None for a local folder."""
    if model.startswith("/"):
        return None
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE) / f"models--{model.replace('/', '--')}" / "blobs"


def _unreached(model: str, why: str) -> LaunchError:
    return LaunchError(
        f"{model} is neither a folder here nor in the hub's cache, and the hub cannot be asked ({why}): "
        "correct --model, restore the network, or copy the model's folder here and name that"
    )


def _refused(model: str, answer: httpx.Response) -> LaunchError:
    reason = f"{answer.status_code}, {answer.headers.get('x-error-message') or answer.reason_phrase}"
    if answer.status_code in (401, 403):
        return LaunchError(
            f"{model} is no folder here, and the hub does not give it to this account ({reason}): correct "
            "--model, or accept the model's terms on its page and set HF_TOKEN"
        )
    return LaunchError(
        f"{model} is neither a folder here nor a model on the hub ({reason} for its config.json): "
        "correct --model"
    )


def _parsed(content: bytes, model: str) -> ModelConfig:
    try:
        config = json.loads(content)
    except ValueError as error:
        raise LaunchError(
            f"the config.json of {model} is not JSON ({error}): download the model again"
        ) from None
    return config if isinstance(config, dict) else {}


def is_text_only(config: ModelConfig) -> bool:
    """Return whether vLLM serves the model for text alone, without media; False if unknown."""
    names = {name for name in config.get("architectures") or () if isinstance(name, str)}
    tables = _tables_of_vllm()
    return bool(names) and names <= tables[TEXT_MODELS] - tables[MEDIA_MODELS]


def may_take_images(config: ModelConfig) -> bool:
    """False if the configuration describes a model without anything for images."""
    return not config or any(
        name.startswith(("vision_", "image_token"))
        or (isinstance(part, dict) and part and may_take_images(part))
        for name, part in config.items()
    )


@cache
def _tables_of_vllm() -> Mapping[str, frozenset[str]]:
    """Architectures that vLLM knows, read without importing it, which takes half a minute."""
    tables: dict[str, frozenset[str]] = {TEXT_MODELS: frozenset(), MEDIA_MODELS: frozenset()}
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        source = (Path(folder) / "model_executor" / "models" / "registry.py").read_text()
        for node in ast.parse(source).body:
            name = (
                node.targets[0].id
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
                else ""
            )
            if name in tables and isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                keys = [each.value for each in node.value.keys if isinstance(each, ast.Constant)]
                tables[name] = frozenset(map(str, keys))
    return tables


def check_redis(url: str, deployment: str) -> None:
    """Connect to Redis once. Raises LaunchError: Redis cannot be used; the text holds no secret."""

    async def connect() -> None:
        async with (
            asyncio.timeout(REDIS_TIMEOUT_S),
            await AsyncBus.connect(url, deployment, client_name="up"),
        ):
            pass

    try:
        asyncio.run(connect())
    except (TriptychError, OSError, ValueError) as error:
        where = urlsplit(url)
        place = where.netloc.rpartition("@")[2] or where.path
        raise LaunchError(
            f"Redis at {place} cannot be used ({str(error) or 'no answer'}): start it, correct --redis-url "
            "(or TRIPTYCH_REDIS_URL), or leave that out for the embedded one"
        ) from None


def check_region(options: ResolvedOptions, config: ModelConfig) -> None:
    """Check that the region holds the encoder caches of all engines that take tensors from it.

    Requests are admitted by those caches' room, and would wait for tensors that do not fit the region.

    Raises:
        LaunchError: it is smaller than caches that hold a step's tokens, or a large item.
    """
    counts = options.counts
    num_caches = counts.prefill_decodes + counts.prefills
    row_bytes = tensor_row_bytes(options, config)
    if not counts.encoders or not num_caches or not row_bytes:
        return
    batched = option_value(options.prefill_decode_args, "--max-num-batched-tokens") or ""
    length = option_value(options.prefill_decode_args, "--max-model-len") or ""
    context = int(length) if length.isdecimal() else _text_config(config).get("max_position_embeddings")
    num_rows = max(
        int(batched) if batched.isdecimal() else FEWEST_ROWS,
        min(context, LARGEST_ITEM_ROWS) if isinstance(context, int) else 0,
    )
    needed = num_caches * num_rows * row_bytes
    if options.region_bytes < needed:
        raise LaunchError(
            f"a region of {options.region_bytes / MIB:.0f} MiB is smaller than the encoder caches of "
            f"{num_caches} engines ({needed / MIB:.0f} MiB), so requests with several images would wait for "
            f"room until their deadline: use --region-bytes {needed} or more"
        )


def tensor_row_bytes(options: ResolvedOptions, config: ModelConfig) -> int:
    """Bytes of one row of encoder output; 0 if the configuration does not have it."""
    text = _text_config(config)
    vision = config.get("vision_config")
    deepstack = vision.get("deepstack_visual_indexes") if isinstance(vision, dict) else None
    width = text.get("hidden_size")
    dtype = (
        option_value(options.encoder_args, "--dtype")
        or text.get("dtype")
        or text.get("torch_dtype")
        or config.get("dtype")
        or config.get("torch_dtype")
    )
    if not isinstance(width, int):
        return 0
    return width * (1 + len(deepstack or ())) * DTYPE_BYTES.get(str(dtype), 2)


def _text_config(config: ModelConfig) -> ModelConfig:
    """Configuration of the language model, at whichever level it is."""
    for name in ("text_config", "thinker_config", "llm_config"):
        if isinstance(part := config.get(name), dict):
            return _text_config(part)
    return config
