"""An engine with the plain connector, as vLLM's scheduler and runner use it: both sides of it, no model."""

from types import SimpleNamespace
from typing import Any

import torch

from tests.support.stores import StoreProcess
from tests.support.vllm_connector.fake_engine import FakeFeature, FakePosition

ROWS, WIDTH = 8, 32
CALL_TIMEOUT_MS = 30_000.0


def output_of(identifier: str) -> torch.Tensor:
    """What an encoder makes of the item: the same in every engine."""
    generator = torch.Generator().manual_seed(sum(map(ord, identifier)))
    return torch.randn(ROWS, WIDTH, generator=generator)


class Media(dict[str, Any]):
    """`MultiModalKwargsItem`, of an item that came with its pixels."""

    def get_data(self) -> dict[str, Any]:
        return dict(self)


def plain_request(name: str, *identifiers: str, has_media: bool = True) -> Any:
    """vLLM's request. Without media: what a proxy sends in place of images, metadata alone."""
    features = [
        FakeFeature(
            identifier, FakePosition(ROWS * place, ROWS, ROWS), Media(pixels=1) if has_media else None
        )
        for place, identifier in enumerate(identifiers)
    ]
    return SimpleNamespace(request_id=name, mm_features=features)


class PlainEngine:
    """`encoder_cache` is the runner's; the test is its manager."""

    def __init__(self, store: StoreProcess, name: str, role: str, **options: Any) -> None:
        # Late: vLLM's modules warn of what they use, and tests that import this one would not be collected.
        from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

        from triptych_vllm_connector.plain.connector import PlainECConnector

        extra = {
            "store_socket": str(store.socket),
            "namespace": "test",
            "call_timeout_ms": CALL_TIMEOUT_MS,
            **options,
        }
        config = SimpleNamespace(
            ec_transfer_config=SimpleNamespace(
                is_ec_producer=role != "ec_consumer",
                is_ec_consumer=role != "ec_producer",
                ec_connector_extra_config=extra,
                engine_id=name,
            ),
            model_config=SimpleNamespace(get_inputs_embeds_size=lambda: WIDTH),
            lora_config=None,
            parallel_config=SimpleNamespace(
                tensor_parallel_size=1, pipeline_parallel_size=1, rank=0, data_parallel_index=0
            ),
            device_config=SimpleNamespace(device_type="cpu"),
        )
        self.scheduler = PlainECConnector(config, ECConnectorRole.SCHEDULER)
        self.worker = PlainECConnector(config, ECConnectorRole.WORKER)
        self.encoder_cache: dict[str, torch.Tensor] = {}

    def plan(self, request: Any) -> tuple[Any, list[str]] | None:
        """One pass of the scheduler: the step's metadata, and what is encoded. None: it is not scheduled."""
        if not self.scheduler.ensure_cache_available(request, 0):
            return None
        to_encode = []
        for index, feature in enumerate(request.mm_features):
            if feature.identifier in self.encoder_cache:
                continue
            if not self.scheduler.has_cache_item(feature.identifier):
                to_encode.append(feature.identifier)
            self.scheduler.update_state_after_alloc(request, index)
        scheduled = SimpleNamespace(num_scheduled_tokens={request.request_id: 1})
        return self.scheduler.build_connector_meta(scheduled), to_encode

    def run(self, step: Any, to_encode: list[str]) -> None:
        """The runner's part, in its order."""
        self.worker.bind_connector_metadata(step)
        if self.worker.is_producer:
            self.worker.start_save_caches(encoder_cache=self.encoder_cache)
        if self.worker.is_consumer:
            self.worker.start_load_caches(self.encoder_cache)
        try:
            for identifier in to_encode:
                self.encoder_cache[identifier] = output_of(identifier)
                self.worker.save_caches(self.encoder_cache, identifier)
        finally:
            self.worker.clear_connector_metadata()

    def serve(self, request: Any) -> list[str] | None:
        """From its first step to its end: what was encoded for it. None: it was not scheduled."""
        planned = self.plan(request)
        if planned is not None:
            self.run(*planned)
            for index in range(len(request.mm_features)):
                self.scheduler.update_state_after_free(request, index)
        self.scheduler.request_finished(request)
        return None if planned is None else planned[1]

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()
