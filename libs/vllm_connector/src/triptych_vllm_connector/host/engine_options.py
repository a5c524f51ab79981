"""vLLM's command-line options for each role, and which of them are refused.

What the user passes through comes last, so it wins.
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import orjson

from triptych_common.domain.errors import TriptychError
from triptych_common.protocol.messages import Role
from triptych_vllm_connector.config import ConnectorConfig

_PACKAGE = "triptych_vllm_connector"
_SERVED_WHOLE = (
    "Serve it by instances that do all of a request: TRIPTYCH_ROLE=encode-prefill-decode, "
    "`./triptych up --encode-prefill-decodes 1`"
)
GPU_ENCODER_TOKENS = 16_384
"""Tokens that an encoder's step may take on a GPU. vLLM's default is 2,048 there, which two images of a
megapixel fill; an encoder has no KV cache, and no tokens to sample that more would delay."""
ENGINE_END_S = 5  # to send final acks, and to end its workers; by vLLM's default it is killed at once


class UnsupportedOptionError(TriptychError):
    """An option would break what the instances have agreed on."""


class UndividedModelError(TriptychError):
    """The model's stages cannot be separated."""


class TextModelError(TriptychError):
    """The model is text-only, so that an encoder has nothing to do."""


def parse_options(options: Sequence[str]) -> Namespace:
    """Parse options as vLLM's server does: every spelling, short names, dotted keys, `--config` files."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from triptych_vllm_connector.seams.current import seam

    parsed: Namespace = seam.cli_args().make_arg_parser(FlexibleArgumentParser()).parse_args(list(options))
    return parsed


def _json(value: object) -> str:
    return orjson.dumps(value).decode()


def _common(
    config: ConnectorConfig, model: str, ec_role: str, manager: str | None, on_gpu: bool
) -> list[str]:
    """Options of both roles; `manager` is the encoder cache manager (None: vLLM's own)."""
    worker = (
        f"{_PACKAGE}.worker.gpu_worker.TriptychGPUWorker"
        if on_gpu
        else f"{_PACKAGE}.worker.cpu_worker.TriptychCPUWorker"
    )
    transfer = {
        "ec_connector": "TriptychECConnector",
        "ec_connector_module_path": f"{_PACKAGE}.connector",
        "ec_role": ec_role,
        "ec_connector_extra_config": orjson.loads(config.model_dump_json()),
    }
    options = [
        f"--model={model}",
        f"--ec-transfer-config={_json(transfer)}",
        f"--worker-cls={worker}",
        "--mm-processor-cache-gb=0",  # an item without its data cannot be encoded, here or as a fallback
    ]
    if manager is not None:
        cls = f"{_PACKAGE}.scheduler.encoder_cache_manager.{manager}"
        options.append(f"--ec-manager-config={_json({'encoder_cache_manager_cls': cls})}")
    return options if on_gpu else [*options, "--enforce-eager"]


def encoder_options(
    config: ConnectorConfig, model: str, encode_batch: int, on_gpu: bool, passed_through: Sequence[str]
) -> list[str]:
    """Options of an engine that runs only the encoder: no language model, no KV cache.

    `encode_batch`: most items of a step.
    """
    return [
        *_common(config, model, "ec_producer", "ForgettingEncoderCacheManager", on_gpu),
        "--mm-encoder-only",
        "--no-async-scheduling",  # no token is sampled: a second step in flight would be empty
        "--disable-log-stats",
        f"--max-num-seqs={encode_batch}",
        *([f"--max-num-batched-tokens={GPU_ENCODER_TOKENS}"] if on_gpu else []),
        *passed_through,
    ]


def prefill_decode_options(
    config: ConnectorConfig,
    model: str,
    on_gpu: bool,
    passed_through: Sequence[str],
    kv_options: Sequence[str] = (),
) -> list[str]:
    """Options of an engine with the language model, and a vision tower only with `config.has_encoder`.

    `kv_options`: of one that hands KV caches over, or takes them (`kv_transfer`).
    """
    scheduler = "decode_scheduler" if config.decodes_only else "parking_scheduler"
    manager = None if config.decodes_only else "PreallocatingEncoderCacheManager"
    options = [
        *_common(config, model, "ec_consumer", manager, on_gpu),
        f"--scheduler-cls={_PACKAGE}.scheduler.{scheduler}.{scheduler}",
        "--enable-mm-embeds",
        f"--shutdown-timeout={ENGINE_END_S}",
        "--otlp-traces-endpoint=triptych",  # turns vLLM's request spans on; `plugin` sends them where ours go
    ]
    if not config.has_encoder:  # with limits of 0 no tower is loaded
        options.append("--limit-mm-per-prompt=" + _json({"image": 0, "video": 0, "audio": 0}))
    return [*options, *kv_options, *passed_through]


def check_division(args: Any, role: Role) -> None:
    """Check that an instance of `role` can serve the model; `args` are vLLM's parsed options.

    Raises:
        UndividedModelError: it is an encoder-decoder model, and the role has not all of its stages; or the
            role is to encode items one by one, and the model's processor looks at all items of a request.
    """
    from vllm.transformers_utils.config import get_config, is_encoder_decoder

    if role is Role.ENCODE_PREFILL_DECODE:
        return
    try:
        config = get_config(
            args.model, args.trust_remote_code, args.revision, args.code_revision, args.config_format
        )
    except (ValueError, OSError):
        return  # vLLM says the same with its own words
    if is_encoder_decoder(config):
        raise UndividedModelError(
            f"{args.model} is an encoder-decoder model, whose stages cannot be apart: its decoder attends to "
            f"all of the encoder's output in every layer. {_SERVED_WHOLE}"
        )
    if role is Role.ENCODE:
        _check_items_are_apart(args)


def _check_items_are_apart(args: Any) -> None:
    """Raise UndividedModelError if the processor's output for an item is not the item's alone."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.model_loader.utils import get_model_cls
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.processing import BaseMultiModalProcessor

    try:
        model_config = AsyncEngineArgs.from_cli_args(args).create_model_config()
        model_cls: Any = get_model_cls(model_config)
    except (ValueError, OSError):
        return  # as above
    factory = getattr(model_cls, "_processor_factory", None)  # None: a model of text alone
    # vLLM keeps processed items by their hash, as Triptych does. A processor for which that would be wrong
    # overrides this: h2ovl cuts an image into other tiles where a request has another one, for example.
    base = BaseMultiModalProcessor._cached_apply_hf_processor
    if factory is None:
        return
    processor_cls: Any = factory.processor
    if not isinstance(processor_cls, type):  # LLaVA's is a function, which chooses the class by the model
        processor_cls = type(MULTIMODAL_REGISTRY.create_processor(model_config))
    if processor_cls._cached_apply_hf_processor is not base:
        raise UndividedModelError(
            f"{args.model} cannot have an encoder: {processor_cls.__name__} does not process each item "
            f"by itself, so that its encoding depends on what else is in the request. {_SERVED_WHOLE}"
        )


def check_has_media(args: Any) -> None:
    """Check that an encoder can encode for the model; `args` are vLLM's parsed options.

    Raises:
        TextModelError: it takes text alone.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    if not AsyncEngineArgs.from_cli_args(args).create_model_config().is_multimodal_model:
        raise TextModelError(
            f"{args.model} is a model of text alone, with nothing to encode: start no encoder for it "
            "(`./triptych up --encoders 0 --local-encode fallback`)"
        )


def fix_structured_outputs_backend(args: Any) -> None:
    """Set xgrammar as the backend of structured outputs, in vLLM's parsed options `args`.

    By vLLM's default the first structured request chooses the backend for all that follow.

    Raises:
        UnsupportedOptionError: the operator names another backend.
    """
    config = args.structured_outputs_config
    if config.backend not in ("auto", "xgrammar"):
        raise UnsupportedOptionError(
            f"--structured-outputs-config: the backend cannot be {config.backend}: only grammars of xgrammar "
            "are compiled in a process that can be ended. Take `backend` out"
        )
    config.backend = "xgrammar"


def check_engine_options(args: Any) -> None:
    """Check vLLM's parsed options, however they were spelled.

    Raises:
        UnsupportedOptionError: the message names the option.
    """
    if args.data_parallel_size > 1:
        raise UnsupportedOptionError(
            "--data-parallel-size cannot be above 1: start an instance for each engine instead, as "
            "`./triptych up --encoders N --prefill-decodes N` does; the gateway spreads requests over them"
        )
    if args.pipeline_parallel_size > 1:
        raise UnsupportedOptionError(
            "--pipeline-parallel-size cannot be above 1: items are handed over to one stage. "
            "Use --tensor-parallel-size"
        )
    if args.enable_tower_connector_lora:
        raise UnsupportedOptionError(
            "--enable-tower-connector-lora cannot be set: encoders apply no LoRA adapter, since an item is "
            "encoded once for all that ask for it. Adapters of the language model need --enable-lora alone"
        )
    for modality, options in (args.media_io_kwargs or {}).items():
        if options:
            # vLLM folds them into an item's identity, which the gateway has named: it would not be found.
            raise UnsupportedOptionError(
                f"--media-io-kwargs cannot be set: take `{modality}` out of it. "
                f"Requests can set options that TRIPTYCH_REQUEST_{modality.upper()}_OPTIONS lists"
            )
