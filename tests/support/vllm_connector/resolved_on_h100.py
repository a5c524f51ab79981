"""Resolve Triptych's options by vLLM on an H100 that is made up: one JSON object by role, on stdout.

    python -m tests.support.vllm_connector.resolved_on_h100

The first folder of PYTHONPATH holds vLLM's Python without compiled parts (`tests/gpu/kit/vllm_python.py`).
"""

from tests.support.vllm_connector import made_up_h100

made_up_h100.install()  # before vLLM asks

import importlib  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory  # noqa: E402
from vllm.usage.usage_lib import UsageContext  # noqa: E402
from vllm.utils.import_utils import resolve_obj_by_qualname  # noqa: E402
from vllm.v1.worker.gpu.model_runner import GPUModelRunner  # noqa: E402
from vllm.v1.worker.gpu.model_states.interface import ModelState  # noqa: E402
from vllm.v1.worker.mm_encoder_model_runner import MMEncoderModelRunner  # noqa: E402

from tests.gpu.kit.vllm_python import TEXT_OPTIONS, TOWER_OPTIONS  # noqa: E402
from triptych_vllm_connector.config import ConnectorConfig  # noqa: E402
from triptych_vllm_connector.host.engine_options import encoder_options, prefill_decode_options  # noqa: E402
from triptych_vllm_connector.host.namespace import parse_engine_options  # noqa: E402
from triptych_vllm_connector.host.platform import has_gpu  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
SERVICES = (
    "triptych_encoder.service",
    "triptych_prefill_decode.service",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
)
OVERRIDDEN = {
    MMEncoderModelRunner: ("execute_model", "load_model"),
    GPUModelRunner: ("execute_model", "load_model", "free_states"),
    ModelState: ("execute_mm_encoder",),
}


def resolved(options: Sequence[str], context: UsageContext) -> dict[str, Any]:
    """Return the facts of vLLM's configuration for these options."""
    config = parse_engine_options(options).create_engine_config(context)
    connector = ECConnectorFactory.get_connector_class(config.ec_transfer_config)
    manager = config.ec_manager_config.encoder_cache_manager_cls if config.ec_manager_config else None
    return {
        "worker": resolve_obj_by_qualname(config.parallel_config.worker_cls).__name__,
        "scheduler": config.scheduler_config.get_scheduler_cls().__name__,
        "connector": connector.__name__,
        "manager": resolve_obj_by_qualname(manager).__name__ if manager else None,
        "is_async": config.scheduler_config.async_scheduling,
        "is_v2": config.use_v2_model_runner,
        "is_encoder_only": config.is_mm_encoder_only,
        "attention": getattr(config.attention_config.backend, "name", None),
    }


def main() -> None:
    for name in SERVICES:
        importlib.import_module(name)
    missing = [
        f"{cls.__name__}.{name}"
        for cls, names in OVERRIDDEN.items()
        for name in names
        if not hasattr(cls, name)
    ]
    model = str(ROOT / "models" / "digits-vl")
    config = ConnectorConfig(
        instance="encoder-0",
        deployment="d",
        redis_url="unix:///nowhere",
        store_socket=Path("/nowhere"),
        namespace_digest="0" * 64,
    )
    on_gpu = has_gpu()
    with_tower = config.model_copy(update={"has_encoder": True})
    encoder = encoder_options(config, model, 8, on_gpu, TOWER_OPTIONS)
    report = {
        "on_gpu": on_gpu,
        "missing": missing,
        "encoder": resolved(encoder, UsageContext.ENGINE_CONTEXT),
        **{
            name: resolved(
                prefill_decode_options(each, model, on_gpu, TEXT_OPTIONS), UsageContext.OPENAI_API_SERVER
            )
            for name, each in (("prefill_decode", config), ("prefill_decode with a tower", with_tower))
        },
    }
    sys.stdout.write(f"\n{json.dumps(report)}\n")


if __name__ == "__main__":
    main()
