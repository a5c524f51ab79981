"""Options of `PlainECConnector`, as vLLM's `ec_connector_extra_config` has them; most have defaults."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat

from triptych_common.domain.hashing import namespace_digest
from triptych_common.protocol.ids import Name
from triptych_vllm_connector.config import StoreConfig
from triptych_vllm_connector.host.namespace import digest_of_engine


class PlainOptions(BaseModel):
    """Written by the user."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store_socket: Path
    namespace: str | None = None  # equal where outputs may be shared; None: made of the model and its options
    instance: Name | None = None  # name at the store, unique among living engines; None: vLLM's `engine_id`
    call_timeout_ms: PositiveFloat = 200.0  # how long a step waits for an answer of the store
    item_timeout_s: NonNegativeFloat = 2.0  # a request whose items this engine cannot encode waits so long
    log_level: str = "INFO"

    @classmethod
    def from_vllm(cls, vllm_config: Any) -> "PlainOptions":
        """Raises pydantic's ValidationError when an option is missing or unknown."""
        return cls.model_validate(vllm_config.ec_transfer_config.ec_connector_extra_config)

    @property
    def call_timeout_s(self) -> float:
        return self.call_timeout_ms / 1000

    def store_config(self, vllm_config: Any) -> StoreConfig:
        """For the sessions of one engine: equal in its EngineCore and in its workers.

        Raises:
            ValueError: the engine has several pipeline stages, or LoRA adapters change what it encodes.
            UnresolvedModelError: the model has no digest, so `namespace` is needed.
            UnsupportedVLLMError: another version of vLLM.
        """
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError("--pipeline-parallel-size cannot be above 1: items are handed over to one stage")
        if vllm_config.lora_config is not None and vllm_config.lora_config.enable_tower_connector_lora:
            raise ValueError(
                "--enable-tower-connector-lora cannot be used: outputs are named by an adapter's name, "
                "which need not mean the same adapter in two engines"
            )
        digest = (
            digest_of_engine(vllm_config)
            if self.namespace is None
            else namespace_digest({"namespace": self.namespace})
        )
        return StoreConfig(
            instance=self.instance or _default_name(vllm_config),
            store_socket=self.store_socket,
            namespace_digest=digest,
            transport="pinned_shm",
            store_timeout_s=self.call_timeout_s,
        )


def _default_name(vllm_config: Any) -> str:
    """vLLM makes a fresh id for each start; engines of one data parallel group share it."""
    return (
        f"vllm-{vllm_config.ec_transfer_config.engine_id}-{vllm_config.parallel_config.data_parallel_index}"
    )
