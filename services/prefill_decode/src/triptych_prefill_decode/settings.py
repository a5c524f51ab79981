"""Settings of prefill_decode, from `TRIPTYCH_*` and the command line."""

import socket
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from triptych_common.cores.plan import CorePolicy
from triptych_common.protocol.ids import Name
from triptych_common.protocol.messages import Role
from triptych_common.protocol.urls import ANY_ADDRESSES, HostText
from triptych_common.runtime import DecodingSettings
from triptych_vllm_connector.config import DecodeShare, Share, TransportSetting

LanguageModelRole = Literal["prefill-decode", "encode-prefill-decode", "prefill", "encode-prefill", "decode"]
_WITH_TOWER = {Role.PREFILL: Role.ENCODE_PREFILL, Role.PREFILL_DECODE: Role.ENCODE_PREFILL_DECODE}


class PrefillDecodeSettings(DecodingSettings):
    """Settings of prefill_decode; `engine_args` are passed to vLLM after the service's own, so they win."""

    config_section = "prefill_decode"

    instance: str = "prefill_decode-0"
    """Name of this instance, unique in the deployment; `{hostname}` in it is replaced by the host's name."""
    model: str
    """Model folder, or a name on the model hub; the same for encoders and prefill_decodes."""
    served_model_name: str | None = None
    """Model name that clients ask for. Not set: the last part of `model`."""
    model_version: Name | None = None
    """Label of the model's version, by which gateways divide requests. Not set: none."""
    engine_args: list[str] = Field(default_factory=list)
    """JSON list of options passed to vLLM, overriding Triptych's own; those that change the encoder's output
    must be the same for encoders and prefill_decodes."""
    host: HostText = "127.0.0.1"
    """Address that vLLM's HTTP server listens on; it has no authentication."""
    port: int = Field(default=8100, ge=0, le=65535)
    """Port that vLLM's HTTP server listens on; 0 takes any free one."""
    advertised_host: HostText | None = Field(
        default_factory=lambda data: socket.gethostname() if data.get("host") in ANY_ADDRESSES else None
    )
    """Name or address that the gateway calls. Not set: `host`, or the machine's name where `host` is all
    addresses."""
    transport: TransportSetting = "auto"
    """Transport of tensors: `pinned_shm`, `cuda_ipc` or `redis`; `auto` chooses by the hardware."""
    local_encode: Literal["never", "fallback"] = "never"
    """Local encode: `fallback` loads the vision tower, to serve requests that no encoder serves in time or
    that the gateway's `encode_decision` sends; costs the tower's memory."""
    role: LanguageModelRole = "prefill-decode"
    """Stages of a request that this instance runs; roles with `encode` have the vision tower."""
    kv_lease_s: PositiveInt = 30
    """Seconds after which a prefilled KV cache that no instance reads is freed; the same for instances that
    prefill and that decode, or gateways do not pair them."""
    kv_port: int = Field(default=0, ge=0, le=65535)
    """Port of the side channel at which other instances ask how to read KV caches; 0 takes any free one."""
    kv_connector_options: dict[str, Any] = Field(default_factory=dict)
    """JSON object of further options of vLLM's KV connector (`kv_connector_extra_config`), without
    `kv_lease_duration`."""
    engine_timeout_s: PositiveFloat = 60.0
    """Seconds for which vLLM may neither answer its host nor make progress; then the service ends, to be
    restarted. On a GPU: more than its slowest step takes."""
    warm_up: bool = True
    """Generate a few tokens in each way of sampling, or pool a prompt, before this instance registers, so
    that an engine's slow first steps delay no caller; an engine that fails at it ends the service."""
    grammar_timeout_s: PositiveFloat = 20.0
    """CPU seconds to compile the grammar of one structured output in a process of its own, which may take
    three times as long by the clock; then its request gets 400."""
    grammar_memory_bytes: PositiveInt = 512 << 20
    """Bytes of memory to compile one grammar, beyond the compile server's own; more: 400. Two run at once."""
    preallocation: Literal["sync", "async"] = "sync"
    """Preallocation of encoder output: `sync` grants rows of a budget to whole requests; `async` grants them
    without a budget."""
    core_policy: CorePolicy = "text_first"
    """Policy by which engines on a CPU share the cores, or a GPU under MPS: `split`, `text_first` or
    `image_first`; also sets the default of `decode_share`."""
    cores: tuple[NonNegativeInt, ...] = ()
    """JSON list of the cores that this engine owns, as many as `OMP_NUM_THREADS`; set by `up` and `demo`.
    Empty: it shares no cores."""
    gpu_engines: PositiveInt = 1
    """Engines that compute on this engine's GPU, with itself; set by `up`, `demo` and Compose."""
    budget_embeds: PositiveInt | None = None
    """Rows of encoder output held for requests at once with `preallocation` `sync`; if set, the gateway
    refuses larger items with 413. Not set: the size of vLLM's encoder cache."""
    budget_num_bytes: PositiveInt | None = None
    """Bytes of encoder output held for requests at once, besides `budget_embeds`. Not set: no bound in bytes.
    """

    overlap: bool = True
    """Compute a prompt up to its first item that has not arrived, while encoders work on the rest."""
    overlap_min_tokens: PositiveInt = 64
    """Fewest tokens that a request computes before its next item arrives; with fewer it waits."""
    overlap_share: Share = 0.5
    """Share of the KV cache and of `--max-num-seqs` for requests that have started and wait for an item."""

    decode_share: DecodeShare | None = None
    """Share of a step's time for requests that decode, while prompts are computed; 0: no bound. Not set: 0.3
    for `text_first`, 0.1 for `image_first`, 0 for `split`."""

    def model_post_init(self, context: Any) -> None:
        """Refuse to encode media with options here, or to decode with a tower; raises ValueError.

        Only encoders check what a processor made of such media before a tower gets it.
        """
        super().model_post_init(context)
        if self.role == "decode" and self.local_encode != "never":
            raise ValueError(
                "TRIPTYCH_LOCAL_ENCODE must be never with TRIPTYCH_ROLE=decode: it takes no media"
            )
        if self.has_tower and (self.request_processor_options or any(self.media_options.values())):
            raise ValueError(
                "TRIPTYCH_REQUEST_PROCESSOR_OPTIONS, TRIPTYCH_REQUEST_IMAGE_OPTIONS, "
                "TRIPTYCH_REQUEST_VIDEO_OPTIONS and TRIPTYCH_REQUEST_AUDIO_OPTIONS must be empty "
                "with TRIPTYCH_LOCAL_ENCODE=fallback, and with roles that encode: media with options are for "
                "encoders alone"
            )

    @property
    def has_tower(self) -> bool:
        """True if this instance can encode."""
        return self.local_encode == "fallback" or self.role.startswith("encode-")

    @property
    def announced_role(self) -> Role:
        """Registered role; `TRIPTYCH_LOCAL_ENCODE=fallback` adds encode."""
        role = Role(self.role)
        return _WITH_TOWER.get(role, role) if self.has_tower else role

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]
