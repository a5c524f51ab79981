"""vLLM's connector metadata, as `PlainECConnector` fills it."""

from dataclasses import dataclass, field

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata

from triptych_vllm_connector.plain.store_pin import StorePin


@dataclass
class PlainStep(ECConnectorMetadata):
    """EngineCore -> worker, with each step. Items by vLLM's identifier."""

    loads: dict[str, StorePin] = field(default_factory=dict)  # into the encoder cache; the pins become yours
    saves: tuple[str, ...] = ()  # of the step's requests: what the encoder cache has of them, the store gets
