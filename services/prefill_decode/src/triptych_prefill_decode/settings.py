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
_WITH_TOWER = {
    Role.PREFILL: Role.ENCODE_PREFILL,
    Role.PREFILL_DECODE: Role.ENCODE_PREFILL_DECODE,
}


class PrefillDecodeSettings(DecodingSettings):
    """Settings of prefill_decode; `engine_args` are passed to vLLM last, so they override ours."""

    config_section = "prefill_decode"

    instance: str = "prefill_decode-0"
    model: str = Field(description="model folder or hub name")
    served_model_name: str | None = Field(default=None, description="[default: the folder's name]")
    model_version: Name | None = Field(
        default=None, description="label of the model's version, for gateways that divide requests by it"
    )
    engine_args: list[str] = Field(default_factory=list, description="options passed through to vLLM")
    host: HostText = Field(default="127.0.0.1", description="address that vLLM's HTTP server listens on")
    port: int = Field(default=8100, ge=0, le=65535, description="0: any free port")
    advertised_host: HostText | None = Field(
        default_factory=lambda data: socket.gethostname() if data.get("host") in ANY_ADDRESSES else None,
        description="what the gateway calls [default: host; this machine's name when bound to all addresses]",
    )
    transport: TransportSetting = Field(
        default="auto", description="how tensors travel: auto, pinned_shm, cuda_ipc or redis"
    )
    local_encode: Literal["never", "fallback"] = Field(
        default="never",
        description="fallback: load the vision tower, for requests that no encoder can serve in time",
    )
    role: LanguageModelRole = Field(
        default="prefill-decode",
        description="stages of a request that this instance does; those with encode have the vision tower",
    )
    kv_lease_s: PositiveInt = Field(
        default=30,
        description="a prefilled KV cache that nobody reads is freed after so long",
    )
    kv_port: int = Field(
        default=0, ge=0, le=65535, description="where others ask how its KV caches are read; 0: any free port"
    )
    kv_connector_options: dict[str, Any] = Field(
        default_factory=dict, description="further options of vLLM's KV connector, as a JSON object"
    )
    engine_timeout_s: PositiveFloat = Field(
        default=60.0,
        description="an engine that neither answers nor computes for so long is restarted (GPU: answers)",
    )
    warm_up: bool = Field(
        default=True, description="generate a few tokens before this instance registers: first steps are slow"
    )
    grammar_timeout_s: PositiveFloat = Field(
        default=20.0, description="CPU time for one structured output's grammar; then its request gets 400"
    )
    grammar_memory_bytes: PositiveInt = Field(
        default=512 << 20, description="memory for that; a grammar that takes more gets 400"
    )
    preallocation: Literal["sync", "async"] = "sync"
    core_policy: CorePolicy = Field(
        default="text_first",
        description="how engines share cores, or a GPU under MPS: split, text_first or image_first",
    )
    cores: tuple[NonNegativeInt, ...] = Field(
        default=(), description="cores that this engine owns, as a JSON list [default: none; it shares none]"
    )
    gpu_engines: PositiveInt = Field(default=1, description="engines that compute on this one's GPU")
    budget_embeds: PositiveInt | None = Field(
        default=None,
        description="rows of encoder output kept for requests at once [default: vLLM's encoder cache]",
    )
    budget_num_bytes: PositiveInt | None = Field(
        default=None, description="the same in bytes; the smaller of the two counts [default: rows alone]"
    )

    overlap: bool = Field(
        default=True, description="compute the prompt up to the first item that is not here yet"
    )
    overlap_min_tokens: PositiveInt = Field(
        default=64, description="for fewer tokens a request does not run before its next item is here"
    )
    overlap_share: Share = Field(
        default=0.5,
        description="of KV cache and running requests, for those that have begun and miss an item",
    )

    decode_share: DecodeShare | None = Field(
        default=None,
        description="of a step's time for requests that decode, while prompts are computed; 0: no bound "
        "[default: 0.3 for text_first, 0.1 for image_first, 0 for split]",
    )

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
        """Model name that clients use."""
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]
