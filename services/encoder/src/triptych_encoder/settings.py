"""Settings of the encoder. Environment: `TRIPTYCH_*`."""

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from triptych_common.cores.plan import CorePolicy
from triptych_common.runtime import DecodingSettings, MetricsSettings
from triptych_common.runtime.media_settings import MAX_IMAGE_PIXELS
from triptych_vllm_connector.config import TransportSetting


class EncoderSettings(DecodingSettings, MetricsSettings):
    """Settings of the encoder; `engine_args` are passed to vLLM after the encoder's own, so they win."""

    config_section = "encoder"

    instance: str = "encoder-0"
    """Name of this encoder, unique in the deployment; `{hostname}` in it is replaced by the host's name."""
    model: str
    """Model folder, or a name on the model hub; the same for encoders and prefill_decodes."""
    engine_args: list[str] = Field(default_factory=list)
    """JSON list of options passed to vLLM, overriding Triptych's own; those that change the encoder's output
    must be the same for encoders and prefill_decodes."""
    num_slots: PositiveInt = 10
    """Jobs in hand at once: being preprocessed, waiting for their encode, or encoded. A request with more
    items than slots waits for encodes before its sizes are known."""
    encode_batch: PositiveInt | None = None
    """Items that vLLM encodes in one batch, its `--max-num-seqs`. Not set: 4 on a GPU; 8 on a CPU, where a
    batch also ends at 0.1 s of predicted work."""
    max_media_bytes: PositiveInt = 64 << 20
    """Bytes of the largest media item that is fetched from a gateway."""
    transport: TransportSetting = "auto"
    """Transport of tensors: `pinned_shm`, `cuda_ipc` or `redis`; `auto` chooses by the hardware."""
    takeover_idle_ms: PositiveInt = 2_000
    """Milliseconds after which another encoder takes over a job that its encoder has not renewed."""
    max_deliveries: PositiveInt = 3
    """Deliveries of one job; a job delivered more often goes to `dead-letters`."""
    engine_timeout_s: PositiveFloat = 60.0
    """Seconds for which vLLM may have jobs, answer none and make no progress; then the encoder ends, to be
    restarted. On a GPU: more than its slowest step takes."""
    max_audio_s: PositiveFloat = 600.0
    """Duration in seconds of the longest audio that is decoded; longer is refused."""
    max_audio_bytes: PositiveInt = 256 << 20
    """Bytes of audio samples after decoding; more are refused."""
    preprocess_pixels: PositiveInt = MAX_IMAGE_PIXELS
    """Pixels of all images that are decoded and preprocessed at once, up to 24 bytes each in the encoder's
    host; a larger image runs alone."""
    core_policy: CorePolicy = "text_first"
    """Policy by which engines on a CPU share the cores, or a GPU under MPS: `split`, each has its part;
    `text_first`, idle cores are lent; `image_first`, images also take cores from text."""
    cores: tuple[NonNegativeInt, ...] = ()
    """JSON list of the cores that this engine owns, as many as `OMP_NUM_THREADS`; set by `up` and `demo`.
    Empty: it shares no cores."""
    other_cores: tuple[NonNegativeInt, ...] = ()
    """JSON list of the cores that the host's other engines own; set by `up` and `demo`. With `text_first`
    this engine's host threads stay off them."""
    gpu_engines: PositiveInt = 1
    """Engines that compute on this engine's GPU, with itself; set by `up`, `demo` and Compose."""
    preprocess_threads: PositiveInt = 1
    """Images up to 2 megapixels that are decoded and preprocessed at once, and as many larger ones."""
    prepared_pixels: PositiveInt = MAX_IMAGE_PIXELS
    """Pixels of all images above 2 megapixels in hand, from preprocessing to the end of their encode, up to
    48 bytes each; a larger image is the only one."""
    debug_encode_delay_ms: NonNegativeInt = 0
    """Milliseconds to sleep before each encode; for tests."""
