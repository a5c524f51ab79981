"""Options of the connector, carried in vLLM's `ec_connector_extra_config`; the environment is not read."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from triptych_common.cores.plan import CorePolicy
from triptych_common.telemetry.exporters import OtlpProtocol
from triptych_common.telemetry.trace_files import DEFAULT_MAX_AGE_S, DEFAULT_MAX_BYTES

Share = Annotated[float, Field(gt=0, le=1)]
DecodeShare = Annotated[float, Field(ge=0, lt=1)]
TransportSetting = Literal["auto", "pinned_shm", "cuda_ipc", "redis"]


class StoreConfig(BaseModel):
    """Options of a store session and of the transports."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    instance: str
    store_socket: Path
    namespace_digest: str
    transport: TransportSetting = "auto"
    store_timeout_s: NonNegativeFloat = 5.0


class ConnectorConfig(StoreConfig):
    """Options of all parts inside vLLM (scheduler, workers, plugin); `engine_options` writes them."""

    deployment: str
    redis_url: str
    log_level: str = "INFO"
    traces_dir: Path | None = None
    traces_max_bytes: NonNegativeInt = DEFAULT_MAX_BYTES
    traces_max_age_s: NonNegativeInt = DEFAULT_MAX_AGE_S
    otlp_endpoint: str | None = None
    otlp_protocol: OtlpProtocol = "http/protobuf"
    preallocation: Literal["sync", "async"] = "sync"
    budget_embeds: PositiveInt | None = None  # None: the size of vLLM's encoder cache
    budget_num_bytes: PositiveInt | None = None  # a second bound; None: rows alone count
    overlap: bool = True  # prefill_decode: requests may begin before all of their items are here
    overlap_min_tokens: PositiveInt = 64  # for fewer of them a request does not run without its next item
    overlap_share: Share = 0.5  # of KV blocks and of seats, for requests that wait for items in their midst
    has_encoder: bool = False  # prefill_decode: the vision tower is loaded, so local encode is possible
    decodes_only: bool = False  # prompts come as KV caches: no item is waited for, and no store is asked
    core_policy: CorePolicy = "text_first"
    decode_share: DecodeShare | None = None  # of a step that also computes prompts; None: by core policy
    cores: tuple[NonNegativeInt, ...] = ()  # that the engine owns; empty: its threads stay as they are
    gpu_engines: PositiveInt = 1  # engines that compute on this engine's GPU
    debug_encode_delay_s: NonNegativeFloat = 0.0  # test option: a slow encoder

    @classmethod
    def of_service(cls, settings: BaseModel, **others: Any) -> "ConnectorConfig":
        """Options copied from a service's settings of the same names, and `others`."""
        return cls(**settings.model_dump(include=set(cls.model_fields)), **others)

    @classmethod
    def from_vllm(cls, vllm_config: Any) -> "ConnectorConfig":
        """Read the options; raises pydantic's ValidationError if one is missing or unknown."""
        return cls.model_validate(vllm_config.ec_transfer_config.ec_connector_extra_config)


STORE_RECONNECT_S = 24 * 3600.0  # a store that restarts takes up the lease; meanwhile only tensors wait

ENGINE_SESSION = "engine"
WORKER_SESSION = "worker"


def engine_session_name(instance: str) -> str:
    """Name of the store session that prefill_decode's EngineCore opens."""
    return f"{instance}/{ENGINE_SESSION}"


def worker_session_name(instance: str, rank: int = 0) -> str:
    """Name of the store session that a worker opens; the writer of the encoder's reservations is rank 0."""
    return f"{instance}/{WORKER_SESSION}-{rank}"
