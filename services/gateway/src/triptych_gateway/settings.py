"""Settings of the gateway. The only place of the package that reads the environment (`TRIPTYCH_*`)."""

import socket
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
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

from triptych_common.domain.image_formats import MAX_IMAGE_PIXELS
from triptych_common.protocol.urls import ANY_ADDRESSES, BaseUrlText, HostText, base_url, local_urls
from triptych_common.runtime import MediaSettings
from triptych_common.telemetry.tail_sampling import TailSampling


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


class GatewaySettings(MediaSettings):
    """Everything an operator can set."""

    config_section = "gateway"

    instance: str = "gateway-0"
    host: HostText = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    advertise_url: BaseUrlText | None = None
    """Base under which encoders reach this gateway for media; default: its own internal host and port."""
    internal_port: int | None = Field(default=None, ge=0, le=65535)
    """A second port, without TLS, for encoders, health checks and scrapes; the other one serves callers alone
    then. None: one port serves all."""
    internal_host: HostText | None = None
    """Address that the internal port listens on. None: `host`."""
    tls_cert_file: Path | None = None
    """The certificate and its chain, PEM; callers are served by HTTPS then. Needs an `internal_port`."""
    tls_key_file: Path | None = None
    """Its key; None: it stands in the same file."""
    tls_client_ca_file: Path | None = None
    """Callers must show a certificate of one of these authorities, PEM. None: none is asked for."""
    forwarded_allow_ips: tuple[IPv4Network | IPv6Network, ...] = ()
    """Proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` count. Empty: no one's."""
    api_keys: tuple[SecretStr, ...] = ()
    """Plain keys, or `sha256:<hex>`. Empty, and no `api_keys_file`: no authentication."""
    api_keys_file: Path | None = None
    """More keys, with names, tenants and limits (`triptych_gateway.access.api_keys_file`)."""
    api_keys_check_s: PositiveFloat = 5.0
    """How often it is looked at for a change."""
    limits_without_redis: Literal["open", "closed"] = "open"
    """Requests of keys with limits that Redis cannot count. `open`: served uncounted; `closed`: 503."""
    limits_timeout_s: PositiveFloat = 1.0
    """For Redis to count one of them."""
    cors_origins: tuple[Origin, ...] = ()
    """Web pages that may call the API from a browser, by origin, or `*`. Empty: none."""

    models_file: Path | None = None
    """Other names of models, and shares of their versions (`triptych_gateway.routing.models_file`)."""
    models_check_s: PositiveFloat = 5.0
    """How often it is looked at for a change."""
    front_end_keys: tuple[str, ...] = ()
    """Names of API keys whose requests may name versions and instances by header. Empty, and no
    `front_end_networks`: no one's."""
    front_end_networks: tuple[IPv4Network | IPv6Network, ...] = ()
    """Likewise of peers in these networks."""

    ui: bool = False
    """Whether the page at `/ui` is served, and recent requests are kept in memory for it."""
    ui_recent_requests: int = Field(default=200, ge=1, le=1000)
    """That are kept, and shown."""
    ui_listeners: int = Field(default=16, ge=1, le=1000)
    """Pages that are open at once; more are refused with 429."""

    trust_traceparent: bool = False
    """Whether a caller's `traceparent` is taken: its request becomes part of the caller's trace, and is
    sampled as that says. Off: each request is a trace of its own."""
    trust_traceparent_networks: tuple[IPv4Network | IPv6Network, ...] = ()
    """Where there are any, of peers in these networks alone."""
    traces_keep_errors: bool = True
    """Keep the gateway's spans of a request that failed (5xx), also where its trace is not sampled."""
    traces_keep_slow_ms: NonNegativeFloat = 0.0
    """Likewise of one that took at least so long; 0: none for that."""

    drain_grace_s: NonNegativeFloat = 1.0
    """How long requests are still taken after the stop was announced, until every balancer has noticed."""
    max_requests_in_flight: PositiveInt = 256
    max_idle_connections: PositiveInt = 2048
    """Callers' connections without a request that is being answered; beyond them the oldest is closed."""
    max_body_bytes: PositiveInt = 64 << 20
    max_answer_bytes: PositiveInt = 64 << 20
    """Of one answer that is not streamed: it is held until it is whole."""
    max_prompt_bytes: PositiveInt = 4 << 20
    """Of one body without its media: what is parsed here, and again by prefill_decode's own server."""
    max_body_values: PositiveInt = 50_000
    """JSON values in one body; counted before it is parsed."""
    max_messages: PositiveInt = 2000
    max_choices: PositiveInt = 128
    """A request's `n`."""
    max_grammar_chars: PositiveInt = 64 << 10
    """Characters of one JSON schema, regular expression or grammar, also of a tool's parameters."""
    max_answer_tokens: PositiveInt = 262_144
    """Tokens of all choices of one request together, where it asks for several; an answer without a named
    limit counts 8,192."""
    max_logprobs: PositiveInt = 250_000
    """Log probabilities of one request: of all tokens of its answers, and of its prompts."""
    max_header_bytes: PositiveInt = 64 << 10
    """Of a request's line and headers together, and of what frames its body."""
    header_timeout_s: PositiveFloat = 10.0
    max_media_in_flight_bytes: PositiveInt = 1 << 30
    max_items: PositiveInt = 16
    max_item_bytes: PositiveInt = 20 << 20
    max_image_pixels: PositiveInt = MAX_IMAGE_PIXELS
    video_piece_rows: NonNegativeInt = 1024
    """Of a video's rows, the fewest that a piece has, where the model's videos can be divided; 0: none is."""
    fetch_urls: bool = True
    """Whether media may be named by http(s) URL. Addresses that are not public are refused all the same."""
    fetch_allowed_ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] = (80, 443)
    fetch_allowed_hosts: tuple[HostPattern, ...] = ()
    """Exact names, or `*.example.org` for all below it. Where there are any, no others are asked."""
    fetch_denied_hosts: tuple[HostPattern, ...] = ()
    """Likewise; they win."""
    fetch_allowed_networks: tuple[IPv4Network | IPv6Network, ...] = ()
    """Networks that may be connected to although they are not public."""
    fetch_max_redirects: int = Field(default=3, ge=0)
    fetch_timeout_s: PositiveFloat = 15.0
    """One item, over all its redirects and attempts, and the wait for a place."""
    fetch_connect_timeout_s: PositiveFloat = 3.0
    fetch_chunk_timeout_s: PositiveFloat = 5.0
    """For the answer's headers, and between two pieces of its body."""
    fetch_max_header_bytes: int = Field(default=16 << 10, ge=1024)
    """Of an answer."""
    fetch_max_attempts: PositiveInt = 3
    fetch_max_in_flight: PositiveInt = 64
    fetch_max_per_host: PositiveInt = 8
    fetch_cache_bytes: int = Field(default=64 << 20, ge=0)
    """Answers that their servers allow to use again; 0: none are kept."""
    fetch_ca_file: Path | None = None
    """Authorities that are trusted besides the system's, PEM."""
    fetch_proxy: SecretStr | None = None
    """An HTTP proxy for all of it, which looks up names itself: it must refuse what is not public."""
    fetch_file_root: AbsolutePath | None = None
    """Where `file://` URLs may point into. None: no file is read."""
    files_dir: AbsolutePath | None = None
    """Where uploaded files are kept; private to the user. None: `/v1/files` is not served."""
    files_max_file_bytes: PositiveInt = 20 << 20
    """No more than `max_item_bytes`, whatever stands here."""
    files_max_bytes: PositiveInt = 10 << 30
    """Of all files together, and of uploads under way."""
    files_max_files: PositiveInt = 10_000
    files_max_key_bytes: PositiveInt = 1 << 30
    """Of one API key's files."""
    files_max_key_files: PositiveInt = 1000
    files_lifetime_s: PositiveInt = 7 * 86_400
    """From a file's upload until it expires, unless the upload says otherwise."""
    files_max_lifetime_s: PositiveInt = 30 * 86_400
    files_upload_timeout_s: PositiveFloat = 300.0
    """For a whole upload. No piece of it may take longer than `body_timeout_s`."""
    files_max_uploads: PositiveInt = 8
    """At once; more are refused with 429."""
    files_encode_ahead: bool = True
    """Whether a file is encoded before a request names it, when encoders have nothing else to do."""
    responses_ttl_s: PositiveInt = 6 * 3600
    """How long a stored response is found, where instances store them."""
    responses_image_bytes: int = Field(default=64 << 20, ge=0)
    """Of stored responses' images, kept for requests that go on from them; the oldest go first."""
    placeholder_tokens: tuple[str, ...] = ()
    """Tokens that no text may contain, besides those that stand for media in the model's prompts."""
    inline_media_bytes: int = Field(default=256 << 10, ge=0)
    """Media up to this size travel inside the job; larger ones are fetched from the gateway."""
    max_media_sends: PositiveInt = 32
    """Media that encoders fetch at once; the others wait their turn."""
    max_queued_jobs: PositiveInt = 1000
    """Encodes that wait here; with more, flows that have more than their part are refused with 429."""

    max_queue_age_s: PositiveFloat = 30.0
    """Likewise a request whose encodes would wait longer, as predicted, or a flow whose oldest one did."""
    flight_check_s: PositiveFloat = 2.0
    """How often unanswered jobs are checked in Redis; those that it has lost are sent again."""
    link_bytes_per_s: PositiveFloat = 125_000_000.0
    """Of a link between two hosts' stores, until its transfers are measured. 1 Gbit/s."""
    link_round_trip_s: PositiveFloat = 0.001
    """Likewise, what a transfer takes besides its bytes."""

    max_transfer_attempts: PositiveInt = 3
    """Transfers of one item to one store, between hosts, until the request fails."""
    transfer_grace_s: PositiveFloat = 2.0
    """Beyond three times what a transfer is predicted to take; an agent that is silent then has failed."""

    first_token_timeout_s: PositiveFloat = 60.0
    request_timeout_s: PositiveFloat = 600.0
    body_timeout_s: PositiveFloat = 30.0
    body_piece_timeout_s: PositiveFloat = 10.0
    """Between two pieces of a body."""
    chunk_timeout_s: PositiveFloat = 60.0
    connect_timeout_s: PositiveFloat = 2.0
    publish_timeout_s: PositiveFloat = 5.0
    encoder_grace_s: PositiveFloat = 5.0
    """How long an image request waits for an encoder to appear in the registry before 503."""
    local_encode_after_s: PositiveFloat = 15.0
    """Time since a request's media were taken after which encoders that have not delivered are given up,
    if an instance with a vision tower is registered: it gets the whole request."""
    encode_decision: Literal["auto", "remote", "local"] = "remote"
    """Whose encode a request's media get, where an instance with a vision tower is registered. `remote`: the
    encoders'; the instance's when they fail. `auto`: the one that is predicted to be there sooner. `local`:
    the instance's."""
    encode_override: Literal["none", "operators", "all"] = "none"
    """Whose requests may say that themselves, by the header X-Triptych-Encode."""
    instance_grace_s: PositiveFloat = 5.0
    """How long a request waits for an instance to come back that served its model before; then 503."""

    max_encode_attempts: PositiveInt = 2
    max_dispatch_attempts: PositiveInt = 2
    resend_to_last_instance: bool = False
    """Whether a request is sent again although only one instance of its model is left, after another one
    ended while it had the request. Such a request may then end all instances. Others are never sent to more
    than two."""
    suspect_s: PositiveFloat = 2.0
    """A prefill_decode that could not be reached is avoided this long."""
    routing_file: Path | None = None
    """How instances are chosen, by stage: weights of scorers, filters, picker (YAML); read at the start."""
    registry_interval_s: PositiveFloat = 0.5
    sizes_cache_items: PositiveInt = 10_000
    sizes_redis_items: PositiveInt = 30_000
    """Items whose placeholder sizes Redis keeps, for all gateways together; the oldest go first."""
    sizes_ttl_s: PositiveInt = 86_400
    """How long those in Redis stay after the last one was written."""
    num_publishers: PositiveInt = 4
    tokenize_timeout_s: PositiveFloat = 2.0
    """For prefill_decode to count the tokens of a text that may be too long."""
    num_body_threads: PositiveInt = 2
    num_media_threads: PositiveInt = 2
    num_file_threads: PositiveInt = 2
    """For uploads; as many again read files, and as many again look at many of them."""

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

    @field_validator("files_max_lifetime_s")
    @classmethod
    def _check_lifetimes(cls, longest: int, others: ValidationInfo) -> int:
        if longest < others.data.get("files_lifetime_s", 0):
            raise ValueError("must not be less than files_lifetime_s")
        return longest

    @property
    def tail_sampling(self) -> TailSampling:
        """What is kept of requests that are not sampled."""
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
        """Where encoders fetch media: `advertise_url`, else this address (by host name when bound to all)."""
        if self.advertise_url is not None:
            return self.advertise_url.rstrip("/")
        host, port = self.addresses[-1]  # without TLS; serves what is no caller's
        return base_url(socket.gethostname() if host in ANY_ADDRESSES else host, port)

    @property
    def local_url(self) -> str:
        """Where this machine reaches the gateway, for what is no caller's."""
        return self.local_urls[0]

    @property
    def local_urls(self) -> tuple[str, ...]:
        """Where it may be reached from this machine (health check): one that answers is enough."""
        return local_urls(*self.addresses[-1])
