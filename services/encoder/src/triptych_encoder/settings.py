"""Settings of the encoder. Environment: `TRIPTYCH_*`."""

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from triptych_common.cores.plan import CorePolicy
from triptych_common.domain.image_formats import MAX_IMAGE_PIXELS
from triptych_common.runtime import DecodingSettings, MetricsSettings
from triptych_vllm_connector.config import TransportSetting


class EncoderSettings(DecodingSettings, MetricsSettings):
    """`engine_args` go to vLLM as they are, after ours, so they win."""

    config_section = "encoder"

    instance: str = "encoder-0"
    model: str = Field(description="model folder or hub name")
    engine_args: list[str] = Field(default_factory=list, description="options passed through to vLLM")
    num_slots: PositiveInt = Field(
        default=10, description="jobs in hand at once: being preprocessed, waiting for their encode, encoded"
    )
    encode_batch: PositiveInt | None = Field(
        default=None,
        description="items that vLLM encodes at once; none: 4 on a GPU, and 8 on a CPU, while they are small",
    )
    max_media_bytes: PositiveInt = Field(default=64 << 20, description="largest media item that is fetched")
    transport: TransportSetting = Field(
        default="auto", description="how tensors travel: auto, pinned_shm, cuda_ipc or redis"
    )
    takeover_idle_ms: PositiveInt = Field(
        default=2_000, description="a job untouched for so long is taken over"
    )
    max_deliveries: PositiveInt = Field(
        default=3, description="a job delivered more often goes to dead-letters"
    )
    engine_timeout_s: PositiveFloat = Field(
        default=60.0,
        description="an engine that neither answers nor computes for so long is restarted (GPU: answers)",
    )
    max_audio_s: PositiveFloat = Field(default=600.0, description="how long audio may last")
    max_audio_bytes: PositiveInt = Field(default=256 << 20, description="of audio's samples, decoded")
    preprocess_pixels: PositiveInt = Field(
        default=MAX_IMAGE_PIXELS, description="pixels of all images that are decoded and preprocessed at once"
    )
    core_policy: CorePolicy = Field(
        default="text_first",
        description="how engines share cores, or a GPU under MPS: split, text_first or image_first",
    )
    cores: tuple[NonNegativeInt, ...] = Field(
        default=(), description="cores that this engine owns, as a JSON list [default: none; it shares none]"
    )
    other_cores: tuple[NonNegativeInt, ...] = Field(
        default=(), description="cores that other engines own, as a JSON list [default: none are known]"
    )
    gpu_engines: PositiveInt = Field(default=1, description="engines that compute on this one's GPU")
    preprocess_threads: PositiveInt = Field(
        default=1, description="images up to 2 megapixels that are preprocessed at once; as many larger ones"
    )
    prepared_pixels: PositiveInt = Field(
        default=MAX_IMAGE_PIXELS,
        description="pixels of all images above 2 megapixels in hand, from preprocessing to encode",
    )
    debug_encode_delay_ms: NonNegativeInt = Field(
        default=0, description="test option: sleep before each encode"
    )
