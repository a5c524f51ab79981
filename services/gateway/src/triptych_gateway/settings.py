"""Settings of the gateway. The only place of the package that reads the environment (`TRIPTYCH_*`)."""

import socket
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from triptych_common.protocol.urls import ANY_ADDRESSES, BaseUrlText, HostText, base_url, local_urls
from triptych_common.runtime import MediaSettings
from triptych_common.runtime.media_settings import MAX_IMAGE_PIXELS
from triptych_common.telemetry.plain_spans import TailSampling


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError("must be an absolute path")
    return path


AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
Origin = Annotated[str, StringConstraints(pattern=r"^(\*|https?://[A-Za-z0-9._:\[\]-]+)$")]
HostPattern = Annotated[
    str,
    StringConstraints(pattern=r"^((\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|[0-9A-Fa-f]*:[0-9A-Fa-f:.]+)$"),
]


class Section(BaseModel, use_attribute_docstrings=True, extra="forbid"):
    """Section of the settings, handed as it is to the owner of what it bounds. Every field has a default."""


class ListenSettings(Section):
    """Ports, their TLS, and bounds of connections."""

    host: HostText = "127.0.0.1"
    """Address to listen on: IPv4, IPv6 or a name. `0.0.0.0` is all of IPv4; `::` is all, IPv4 too."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes any free one."""
    advertise_url: BaseUrlText | None = None
    """Base URL at which encoders fetch media from this gateway. Not set: its internal host and port."""
    internal_port: int | None = Field(default=None, ge=0, le=65535)
    """Second port, plain HTTP, for encoders, health checks and scrapes; `port` then serves callers alone. Not
    set: `port` serves all of them."""
    internal_host: HostText | None = None
    """Address that `internal_port` listens on and is announced by. Not set: `host`."""
    tls_cert_file: Path | None = None
    """PEM file of the certificate and its chain: callers are served by HTTPS. Needs `internal_port`."""
    tls_key_file: Path | None = None
    """PEM file of the certificate's key, without a passphrase. Not set: it is in `tls_cert_file`."""
    tls_client_ca_file: Path | None = None
    """PEM file of authorities: callers must show a certificate of one of them. Not set: none is asked for."""
    max_tls_handshakes_per_s: PositiveFloat = 100.0
    """TLS handshakes that begin in a second; others wait, in turns of the callers' addresses."""
    forwarded_allow_ips: tuple[IPv4Network | IPv6Network, ...] = ()
    """JSON list of the networks of proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` are believed."""
    max_idle_connections: PositiveInt = 2048
    """Callers' connections on which no request is being answered; beyond this the oldest is closed."""
    max_header_bytes: PositiveInt = 64 << 10
    """Bytes of a request's line and headers together, and of what frames its body; more: 431."""
    header_timeout_s: PositiveFloat = 10.0
    """Seconds to send a request's line and headers; then 408. Also bounds a body that outlasts its answer."""

    @model_validator(mode="after")
    def _check_tls(self) -> Self:  # noqa: N804 - pydantic calls it on the model
        if self.tls_cert_file is None and (self.tls_key_file or self.tls_client_ca_file):
            raise ValueError("tls_key_file and tls_client_ca_file need a tls_cert_file")
        if self.tls_cert_file is not None and self.internal_port is None:
            raise ValueError("tls_cert_file needs an internal_port, for encoders and health checks")
        if self.internal_port and self.internal_port == self.port:
            raise ValueError("internal_port must not be port")
        if self.internal_host is not None and self.internal_port is None:
            raise ValueError("internal_host needs an internal_port")
        return self


class AccessSettings(Section):
    """Callers: their keys, and what their headers may set."""

    api_keys: tuple[SecretStr, ...] = ()
    """JSON list of API keys, plain or `sha256:{hex}`. Empty, without `api_keys_file`: no authentication."""
    api_keys_file: Path | None = None
    """TOML file of more API keys, with their names, tenants and limits. Not set: `api_keys` alone."""
    api_keys_check_s: PositiveFloat = 5.0
    """Seconds between two checks of `api_keys_file` for a change."""
    limits_without_redis: Literal["open", "closed"] = "open"
    """Requests of keys with limits while Redis is away: `open`, served uncounted; `closed`, 503."""
    limits_timeout_s: PositiveFloat = 1.0
    """Seconds until the Redis call that counts a request against its key's limits is given up."""
    cors_origins: tuple[Origin, ...] = ()
    """JSON list of origins whose web pages may call `/v1/…` from a browser, or `["*"]`. Empty: none."""
    front_end_keys: tuple[str, ...] = ()
    """JSON list of the names of API keys whose requests may choose versions and instances by header."""
    front_end_networks: tuple[IPv4Network | IPv6Network, ...] = ()
    """JSON list of networks whose peers may choose versions and instances by header."""
    trust_traceparent: bool = False
    """Take callers' `traceparent` and `tracestate`: a request joins its caller's trace and its sampling. Off:
    each request is a trace of its own."""
    trust_traceparent_networks: tuple[IPv4Network | IPv6Network, ...] = ()
    """JSON list of networks: `traceparent` is taken from peers in them alone. Empty: from every peer."""


class RoutingSettings(Section):
    """Registry of instances, and the choice among them."""

    models_file: Path | None = None
    """YAML file of further names of models, and of the shares of their versions. Not set: none."""
    models_check_s: PositiveFloat = 5.0
    """Seconds between two checks of `models_file` for a change."""
    instance_grace_s: PositiveFloat = 5.0
    """Seconds that a request waits for an instance that served its model before to return; then 503."""
    max_dispatch_attempts: PositiveInt = 2
    """Instances tried for one request; a pair's failed instances and failed handovers count apart."""
    resend_to_last_instance: bool = False
    """Send a request again to the last instance of its model after another one ended while it had the
    request. One request may then end all instances; otherwise it is never sent to more than two."""
    suspect_s: PositiveFloat = 2.0
    """Seconds for which an instance that could not be reached is avoided, unless it is the only one."""
    routing_file: Path | None = None
    """YAML file of how instances are chosen at each stage: scorers and their weights, filters, picker; read
    at the start. Not set: the default of each stage."""
    registry_interval_s: PositiveFloat = 0.5
    """Seconds between two reads of the registry of instances."""


class BodySettings(Section):
    """Bounds of reading a body."""

    max_body_bytes: PositiveInt = 64 << 20
    """Bytes of a request's body; a larger one is refused with 413."""
    body_timeout_s: PositiveFloat = 30.0
    """Seconds for a caller to send a request's body; then 408."""
    body_piece_timeout_s: PositiveFloat = 10.0
    """Seconds between two pieces of a request's body; then 408."""


class RequestSettings(Section):
    """Bounds of one parsed request. Each guards the event loop of the gateway, or of prefill_decode."""

    max_prompt_bytes: PositiveInt = 4 << 20
    """Bytes of a request's body without the media in its `data:` URLs; larger: 413."""
    max_body_values: PositiveInt = 50_000
    """JSON values in a request's body, counted before it is parsed; more: 400."""
    max_messages: PositiveInt = 2000
    """Messages in one request; more: 400."""
    max_choices: PositiveInt = 128
    """Choices of one request: its `n` times the number of its prompts; more: 400."""
    max_grammar_chars: PositiveInt = 64 << 10
    """Characters of one schema, regular expression or grammar; more: 400 `grammar_too_complex`."""
    max_answer_tokens: PositiveInt = 262_144
    """Tokens of all choices of one request that asks for several: choices times `max_tokens`, or times 8,192
    where the request sets none; more: 400."""
    max_logprobs: PositiveInt = 250_000
    """Log probabilities of one request, of all tokens of its answers and prompts; more: 400."""
    max_items: PositiveInt = 64
    """Media items in one request; more: 400."""
    placeholder_tokens: tuple[str, ...] = ()
    """JSON list of tokens that no text of a request may contain, besides the placeholders of the model."""


class ItemSettings(Section):
    """Bounds of one media item."""

    max_item_bytes: PositiveInt = 20 << 20
    """Bytes of one media item, decoded from base64 or fetched; larger: 413."""
    max_image_pixels: PositiveInt = MAX_IMAGE_PIXELS
    """Pixels of an image, width times height, as its header says; larger: 413."""
    video_piece_rows: NonNegativeInt = 1024
    """Fewest rows of a piece of a video, for models whose videos can be encoded in pieces; 0: none is
    divided. Part of a video's identity: give all gateways the same."""


class FetchSettings(ItemSettings):
    """Media named by URL."""

    fetch_urls: bool = True
    """Fetch media named by http(s) URL, from public addresses. Off: 400 `remote_media_disabled`."""
    fetch_allowed_ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] = (80, 443)
    """JSON list of the ports that media may be fetched from."""
    fetch_allowed_hosts: tuple[HostPattern, ...] = ()
    """JSON list of hosts for media, in ASCII: exact, or `*.example.org` for all below. Empty: all."""
    fetch_denied_hosts: tuple[HostPattern, ...] = ()
    """JSON list of hosts that media are never fetched from; overrides `fetch_allowed_hosts`."""
    fetch_allowed_networks: tuple[IPv4Network | IPv6Network, ...] = ()
    """JSON list of networks that media may be fetched from although they are not public, for all callers."""
    fetch_max_redirects: int = Field(default=3, ge=0)
    """Redirects that are followed for one item; 0: none."""
    fetch_timeout_s: PositiveFloat = 15.0
    """Seconds to fetch one item, with all redirects and attempts and the wait for a free download."""
    fetch_connect_timeout_s: PositiveFloat = 3.0
    """Seconds to look up a host's name, and to connect to one address."""
    fetch_chunk_timeout_s: PositiveFloat = 5.0
    """Seconds for the headers of a server's answer, and between two pieces of its body."""
    fetch_max_header_bytes: int = Field(default=16 << 10, ge=1024)
    """Bytes of the headers of a server's answer; more: the fetch fails."""
    fetch_max_attempts: PositiveInt = 3
    """Attempts to fetch one item; 1: nothing is retried."""
    fetch_max_in_flight: PositiveInt = 64
    """Downloads that run at once; the others wait."""
    fetch_max_per_host: PositiveInt = 8
    """Downloads from one host that run at once; the others wait."""
    fetch_cache_bytes: int = Field(default=64 << 20, ge=0)
    """Bytes of fetched media kept in memory, where their servers allow it; 0: none are kept."""
    fetch_ca_file: Path | None = None
    """PEM file of authorities trusted besides the system's for https URLs. Not set: the system's alone."""
    fetch_proxy: SecretStr | None = None
    """URL of an HTTP proxy for all fetches; it looks up names itself, so it must refuse what is not public.
    Not set: none is used, and none of the environment."""
    fetch_file_root: AbsolutePath | None = None
    """Absolute path of a folder of files that any caller may name by `file://` URL. Not set: none."""


class FileSettings(ItemSettings, BodySettings):
    """Directory of uploaded files, and bounds on them."""

    files_dir: AbsolutePath | None = None
    """Absolute path of the folder of uploaded files; made with mode 0700, and refused if others can read it.
    Gateways may share it. Not set: `/v1/files` is not served."""
    files_max_file_bytes: PositiveInt = 20 << 20
    """Bytes of one uploaded file; larger, or larger than `max_item_bytes`: 413."""
    files_max_bytes: PositiveInt = 10 << 30
    """Bytes of all uploaded files, with uploads under way; more: 503."""
    files_max_files: PositiveInt = 10_000
    """Number of all uploaded files; more: 503."""
    files_max_key_bytes: PositiveInt = 1 << 30
    """Bytes of all files of one API key; more: 403."""
    files_max_key_files: PositiveInt = 1000
    """Number of files of one API key; more: 403."""
    files_lifetime_s: PositiveInt = 7 * 86_400
    """Seconds from a file's upload until it expires, unless the upload names another time."""
    files_max_lifetime_s: PositiveInt = 30 * 86_400
    """Longest lifetime in seconds that an upload may name; not less than `files_lifetime_s`."""
    files_upload_timeout_s: PositiveFloat = 300.0
    """Seconds for a whole upload; then 408. Each piece of it has `body_timeout_s`."""
    files_max_uploads: PositiveInt = 8
    """Uploads that run at once; more are refused with 429."""
    files_encode_ahead: bool = True
    """Encode an uploaded file before a request names it, while encoders are idle."""

    @property
    def max_file_bytes(self) -> int:
        return min(self.files_max_file_bytes, self.max_item_bytes)

    @field_validator("files_max_lifetime_s")
    @classmethod
    def _check_lifetimes(cls, longest: int, others: ValidationInfo) -> int:
        if longest < others.data.get("files_lifetime_s", 0):
            raise ValueError("must not be less than files_lifetime_s")
        return longest


class SharedItemSettings(Section):
    """Facts about items that gateways share in Redis."""

    publish_timeout_s: PositiveFloat = 5.0
    """Seconds to publish one encode job, and to look up sizes in Redis."""
    sizes_redis_items: PositiveInt = 30_000
    """Items whose placeholder sizes, and with several stores whose locations, Redis keeps for all gateways;
    the oldest are dropped. Give all gateways the same."""
    sizes_ttl_s: PositiveInt = 86_400
    """Seconds for which placeholder sizes stay in Redis after the last one was written."""


class EncodeSettings(SharedItemSettings):
    """Encode jobs, and how long requests wait for them."""

    inline_media_bytes: int = Field(default=256 << 10, ge=0)
    """Bytes up to which media travel inside the encode job; encoders fetch larger ones from the gateway."""
    max_queued_jobs: PositiveInt = 1000
    """Encode jobs of one namespace that wait at this gateway; beyond this, requests of keys or tenants that
    exceed their share of the queue are refused with 429."""
    max_queue_age_s: PositiveFloat = 30.0
    """Seconds that an encode job may wait, as predicted or measured for its key or tenant; longer: 429."""
    flight_check_s: PositiveFloat = 2.0
    """Seconds between two checks of unanswered jobs in Redis; jobs that Redis has lost are sent again."""
    max_encode_attempts: PositiveInt = 2
    """Encode jobs published for one item, by all gateways together, before its requests fail."""
    num_publishers: PositiveInt = 4
    """Encode jobs that are published at once."""
    sizes_cache_items: PositiveInt = 10_000
    """Items whose placeholder sizes this gateway keeps in memory."""
    encoder_grace_s: PositiveFloat = 5.0
    """Seconds that a request with media waits for an encoder to appear in the registry; then 503. Set minutes
    where encoders are started on demand."""
    encoders_on_demand: bool = False
    """Encoders are started for requests that wait for one, from zero too: a namespace without an encoder may
    always get one, and streams that wait for it are kept open by comments."""
    local_encode_after_s: PositiveFloat = 15.0
    """Seconds after which encoders that have not delivered a request's items are given up, and an instance
    with a vision tower gets the whole request, if one is registered."""
    encode_decision: Literal["auto", "remote", "local"] = "remote"
    """Process that encodes, where an instance with a vision tower is registered: `remote`, an encoder, or the
    instance if encoders fail; `auto`, the one predicted to finish sooner; `local`, the instance."""
    encode_override: Literal["none", "operators", "all"] = "none"
    """Callers whose requests may override `encode_decision` by the header `X-Triptych-Encode`; `operators`
    are the API keys with `operator = true`."""


class TransferSettings(SharedItemSettings):
    """Transfers between hosts' stores."""

    link_bytes_per_s: PositiveFloat = 125_000_000.0
    """Bytes per second assumed for the link between two hosts' stores until its transfers are measured."""
    link_round_trip_s: PositiveFloat = 0.001
    """Seconds assumed for a transfer between two hosts besides its bytes, until transfers are measured."""
    max_transfer_attempts: PositiveInt = 3
    """Transfers of one item to the store of one instance before its requests fail; with several stores."""
    transfer_grace_s: PositiveFloat = 2.0
    """Seconds beyond three times the predicted time after which a silent agent fails a transfer."""


class GatewaySettings(
    TransferSettings,
    EncodeSettings,
    FileSettings,
    FetchSettings,
    RequestSettings,
    RoutingSettings,
    AccessSettings,
    ListenSettings,
    MediaSettings,
):
    """Settings of the gateway, all that an operator can set. The last section is listed first."""

    config_section = "gateway"

    instance: str = "gateway-0"
    """Name of this gateway, unique in the deployment; `{hostname}` in it is replaced by the host's name."""
    ui: bool = False
    """Serve the page at `/ui`, and keep ids, sizes and times of recent requests in memory for it."""
    ui_recent_requests: int = Field(default=200, ge=1, le=1000)
    """Recent requests that are kept in memory and shown at `/ui`."""
    ui_listeners: int = Field(default=16, ge=1, le=1000)
    """Pages at `/ui` that may be open at once; more are refused with 429."""
    traces_keep_errors: bool = True
    """Keep the gateway's spans of a request that failed with 5xx even if its trace is not sampled."""
    traces_keep_slow_ms: NonNegativeFloat = 0.0
    """Keep spans of requests that took this many milliseconds though their trace is unsampled; 0: none."""
    drain_grace_s: NonNegativeFloat = 1.0
    """Seconds for which requests are still taken after `/health/ready` has turned 503; part of
    `drain_timeout_s`, and longer than the interval of the balancer's checks."""
    max_requests_in_flight: PositiveInt = 256
    """Requests that are served at once; more are refused with 429."""
    max_answer_bytes: PositiveInt = 64 << 20
    """Bytes of an answer that is not streamed, held until it is whole; larger: 413 `answer_too_large`."""
    max_media_in_flight_bytes: PositiveInt = 1 << 30
    """Bytes of all bodies and media held at once, as far as they have arrived; more: 429 `too_much_media`."""
    responses_ttl_s: PositiveInt = 6 * 3600
    """Seconds for which a stored response can be found, where instances store responses."""
    responses_image_bytes: int = Field(default=64 << 20, ge=0)
    """Bytes of stored responses' images kept in memory to continue them; least recently used go first."""
    max_media_sends: PositiveInt = 32
    """Media that encoders fetch from this gateway at once; the others wait in order."""
    first_token_timeout_s: PositiveFloat = 60.0
    """Seconds from a request's arrival to the first event of its stream, and for any request to get the sizes
    and tensors of its media."""
    request_timeout_s: PositiveFloat = 600.0
    """Seconds for a whole request."""
    chunk_timeout_s: PositiveFloat = 60.0
    """Seconds between two events of a stream, and for which a caller may read nothing of its answer before
    the gateway closes the connection."""
    connect_timeout_s: PositiveFloat = 2.0
    """Seconds to connect to a prefill_decode instance."""
    tokenize_timeout_s: PositiveFloat = 2.0
    """Seconds for prefill_decode to count the tokens of a long text; then it is served uncounted."""
    num_body_threads: PositiveInt = 2
    """Threads that parse large texts and reassemble bodies."""
    num_media_threads: PositiveInt = 2
    """Threads that read files and image headers, hash media, and decode base64 left to the end."""
    num_file_threads: PositiveInt = 2
    """Threads that write uploads; as many again read uploaded files, and as many list and remove them."""

    @property
    def tail_sampling(self) -> TailSampling:
        """Rules for keeping spans of requests that are not sampled."""
        return TailSampling(self.traces_keep_errors, self.traces_keep_slow_ms)

    @property
    def has_tls(self) -> bool:
        return self.tls_cert_file is not None

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Hosts and ports to listen on: callers' first, and the internal one where there is one."""
        callers = (self.host, self.port)
        if self.internal_port is None:
            return (callers,)
        return (callers, (self.internal_host or self.host, self.internal_port))

    @property
    def media_base_url(self) -> str:
        """Base URL at which encoders fetch media: `advertise_url`, or this address with a host name."""
        if self.advertise_url is not None:
            return self.advertise_url.rstrip("/")
        host, port = self.addresses[-1]  # without TLS; serves what is no caller's
        return base_url(socket.gethostname() if host in ANY_ADDRESSES else host, port)

    @property
    def local_urls(self) -> tuple[str, ...]:
        """URLs of the gateway on this machine (health check): one that answers is enough."""
        return local_urls(*self.addresses[-1])
