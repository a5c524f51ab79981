"""The EC connector for vLLM as it comes: `vllm serve` with the stock scheduler, and a cache store.

    --ec-transfer-config '{"ec_connector": "PlainECConnector",
      "ec_connector_module_path": "triptych_vllm_connector.plain.connector",
      "ec_role": "ec_producer", "ec_connector_extra_config": {"store_socket": "/run/triptych/store.sock"}}'

Either role loads what the store has. `ec_producer` and `ec_both` save what they encode; `ec_consumer` does
not. Which proxy or router sends the requests does not matter.
"""

import functools
from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.utils import (
    PlaceholderMetadataResolver,
    collect_ec_item_metadata,
)

from triptych_common.domain.hashing import plain_item_hash
from triptych_common.telemetry.logs import setup_logging
from triptych_vllm_connector.consumer.local_encode import LocalEncode
from triptych_vllm_connector.plain.options import PlainOptions
from triptych_vllm_connector.plain.plain_step import PlainStep
from triptych_vllm_connector.plain.plain_worker import PlainWorker
from triptych_vllm_connector.plain.store_pins import BoundedPins
from triptych_vllm_connector.plain.wanted_items import WantedItems


class PlainECConnector(ECConnectorBase):
    """Loaded by `ec_connector_module_path`; options are `PlainOptions`."""

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
        """A producer's answer has the items' metadata: with them another engine needs no media."""
        if self._items is None or not request.mm_features:
            return False, None
        self._items.on_finished(request)
        metadata = collect_ec_item_metadata(request.mm_features, self._resolver) if self.is_producer else None
        return False, metadata or None

    # ---- worker side -----------------------------------------------------------------------------
    def start_save_caches(self, **kwargs: Any) -> None:
        """vLLM calls it for a producer, and `start_load_caches` for a consumer alone."""
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
        """The step has ended, however."""
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
