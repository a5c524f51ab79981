"""EC connector for stock vLLM: `vllm serve` with vLLM's own scheduler, and a cache store.

    --ec-transfer-config '{"ec_connector": "PlainECConnector",
      "ec_connector_module_path": "triptych_vllm_connector.plain.connector",
      "ec_role": "ec_producer", "ec_connector_extra_config": {"store_socket": "/run/triptych/store.sock"}}'

Either role loads what the store has. `ec_producer` and `ec_both` save what they encode; `ec_consumer` does
not. Any proxy or router may send the requests.
"""

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.distributed.ec_transfer.ec_connector.utils import (
    PlaceholderMetadataResolver,
    collect_ec_item_metadata,
)

from triptych_common.domain.hashing import namespace_digest, plain_item_hash
from triptych_common.protocol.ids import Name
from triptych_common.telemetry.logs import setup_logging
from triptych_vllm_connector.config import StoreConfig
from triptych_vllm_connector.consumer.local_encode import LocalEncode
from triptych_vllm_connector.host.namespace import digest_of_engine
from triptych_vllm_connector.plain.plain_worker import PlainWorker
from triptych_vllm_connector.plain.store_pins import BoundedPins, StorePin
from triptych_vllm_connector.plain.wanted_items import WantedItems


class PlainOptions(BaseModel):
    """Options of `PlainECConnector`, which the user writes as vLLM's `ec_connector_extra_config`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store_socket: Path
    namespace: str | None = None  # equal where outputs may be shared; None: made of the model and its options
    instance: Name | None = None  # name at the store, unique among living engines; None: vLLM's `engine_id`
    call_timeout_ms: PositiveFloat = 200.0  # how long a step waits for an answer of the store
    item_timeout_s: NonNegativeFloat = 2.0  # a request whose items this engine cannot encode waits so long
    log_level: str = "INFO"

    @classmethod
    def from_vllm(cls, vllm_config: Any) -> "PlainOptions":
        """Read the options; raises pydantic's ValidationError if one is missing or unknown."""
        return cls.model_validate(vllm_config.ec_transfer_config.ec_connector_extra_config)

    @property
    def call_timeout_s(self) -> float:
        return self.call_timeout_ms / 1000

    def store_config(self, vllm_config: Any) -> StoreConfig:
        """Configuration of one engine's store sessions, equal in EngineCore and workers.

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
    """Instance name from vLLM's id, which is new for each start and shared by a data parallel group."""
    return (
        f"vllm-{vllm_config.ec_transfer_config.engine_id}-{vllm_config.parallel_config.data_parallel_index}"
    )


@dataclass
class PlainStep(ECConnectorMetadata):
    """EngineCore -> worker, with each step: loads and saves by vLLM's identifier."""

    loads: dict[str, StorePin] = field(default_factory=dict)  # whose pins pass to the worker
    saves: tuple[str, ...] = ()  # items of the step's requests that go from the encoder cache to the store


class PlainECConnector(ECConnectorBase):
    """The EC connector that `ec_connector_module_path` names; its options are `PlainOptions`."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        options = PlainOptions.from_vllm(vllm_config)
        config = options.store_config(vllm_config)
        setup_logging("vllm", config.instance, options.log_level, json_lines=False)
        hash_of = functools.partial(plain_item_hash, config.namespace_digest)
        self._resolver = PlaceholderMetadataResolver(vllm_config.model_config)
        self._pins: BoundedPins | None = None
        self._items: WantedItems | None = None
        self._worker: PlainWorker | None = None
        if role is ECConnectorRole.SCHEDULER:
            self._resolver.fields_for("image")  # makes the model's processor: now, not in a request's step
            local = LocalEncode(self._resolver.fields_for)
            self._pins = BoundedPins(config, vllm_config.parallel_config.tensor_parallel_size)
            width = vllm_config.model_config.get_inputs_embeds_size()
            self._items = WantedItems(self._pins, hash_of, local.has_media, options.item_timeout_s, width)
        else:
            rank: int = vllm_config.parallel_config.rank
            device_type: str = vllm_config.device_config.device_type
            self._worker = PlainWorker(config, rank, device_type, hash_of, saves=self.is_producer)

    # ---- scheduler side --------------------------------------------------------------------------
    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        return self._items is None or self._items.admit_request(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        return self._items is not None and self._items.has_item(identifier)

    def take_unavailable_requests(self) -> set[str]:
        return self._items.take_unavailable() if self._items is not None else set()

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        if self._items is not None:
            self._items.on_allocated(request.mm_features[index].identifier)

    def update_state_after_free(self, request: Any, index: int) -> None:
        if self._items is not None:
            self._items.on_computed(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: Any) -> PlainStep:
        if self._items is None:
            return PlainStep()
        return PlainStep(*self._items.take_step(scheduler_output.num_scheduled_tokens))

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Add the items' metadata to a producer's answer: with them another engine needs no media."""
        if self._items is None or not request.mm_features:
            return False, None
        self._items.on_finished(request)
        metadata = collect_ec_item_metadata(request.mm_features, self._resolver) if self.is_producer else None
        return False, metadata or None

    # ---- worker side -----------------------------------------------------------------------------
    def start_save_caches(self, **kwargs: Any) -> None:
        """Load and save; vLLM calls this for a producer, and `start_load_caches` only for a consumer."""
        if self._worker is None:
            return
        step, encoder_cache = self._step(), kwargs["encoder_cache"]
        if not self.is_consumer:
            self._worker.load_items(encoder_cache, step.loads)
        self._worker.on_step_start(encoder_cache, step.saves)

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.load_items(encoder_cache, self._step().loads)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        if self._worker is not None and self.is_producer:
            self._worker.on_encoded(mm_hash, encoder_cache[mm_hash])

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        if self._worker is not None and self.is_producer:
            self._worker.on_step_end()

    def shutdown(self) -> None:
        if self._pins is not None:
            self._pins.close()
        if self._worker is not None:
            self._worker.close()

    def _step(self) -> PlainStep:
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, PlainStep):
            raise TypeError(f"expected PlainStep, got {type(metadata).__name__}")
        return metadata
