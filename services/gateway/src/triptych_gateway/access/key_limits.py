"""Limits of one API key, a request's cost under them, and the headers that report them.

Pure: `key_limiter` counts. A limit that a key does not have is None.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from triptych_common.coordination import RateCharge
from triptych_common.domain.errors import RequestError
from triptych_gateway.endpoints.answer_cost import (
    ANSWER_FIELDS,
    BYTES_PER_TOKEN,
    AnswerCost,
    count_of,
    num_prompts,
)
from triptych_gateway.errors import model_not_found

Limit = Annotated[int, Field(strict=True, ge=1, le=10**12)]
Places = Annotated[int, Field(strict=True, ge=1, le=1000)]
Priority = Annotated[int, Field(strict=True, ge=-1000, le=1000)]
ModelName = Annotated[str, StringConstraints(min_length=1)]

PRIORITY_FIELD = "priority"  # of a body; vLLM's
REQUESTS, TOKENS, MEDIA_BYTES, CONCURRENT = "requests", "tokens", "media_bytes", "concurrent_requests"
_SHOWN = {REQUESTS: "requests per minute", TOKENS: "tokens per minute", MEDIA_BYTES: "media bytes per minute"}
_PRIORITY = TypeAdapter(Annotated[int, Field(ge=-(2**63), lt=2**63)])  # of a body, as vLLM reads it


class KeyLimits(BaseModel):
    """Limits of one API key; None is no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: Annotated[tuple[ModelName, ...], Field(min_length=1)] | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    """Tokens per minute of prompts and answers together."""
    media_bytes_per_minute: Limit | None = None
    max_concurrent_requests: Places | None = None
    priority: Priority | None = None
    """Priority of the key's requests, as vLLM counts: a request may ask for a lower one, a higher number."""

    def or_else(self, defaults: "KeyLimits") -> Self:
        """Return these limits, completed by those of `defaults`."""
        missing = {name for name in KeyLimits.model_fields if getattr(self, name) is None}
        return self.model_copy(update={name: getattr(defaults, name) for name in missing})

    @property
    def is_counted(self) -> bool:
        """True if requests are counted; the models are only looked up."""
        return bool(self.rates) or self.max_concurrent_requests is not None

    @property
    def rates(self) -> dict[str, int]:
        limits = {
            REQUESTS: self.requests_per_minute,
            TOKENS: self.tokens_per_minute,
            MEDIA_BYTES: self.media_bytes_per_minute,
        }
        return {rate: limit for rate, limit in limits.items() if limit is not None}

    def with_priority(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return `body` with the key's priority, or the lower one that it asks for.

        Raises:
            RequestError: 400, the requested priority is invalid.
        """
        if self.priority is None:
            return body
        try:
            asked = _PRIORITY.validate_python(body.get(PRIORITY_FIELD, self.priority))
        except ValidationError as error:
            message = f"{PRIORITY_FIELD} must be a whole number"
            raise RequestError(400, "invalid_value", message, PRIORITY_FIELD) from error
        return {**body, PRIORITY_FIELD: max(asked, self.priority)}

    def allows_model(self, model: str) -> bool:
        return self.models is None or model in self.models

    def check_model(self, model: str) -> None:
        """Check that the key may use `model`; a forbidden model is reported as missing.

        Raises:
            RequestError: 404.
        """
        if not self.allows_model(model):
            raise model_not_found(model)


@dataclass(frozen=True, slots=True)
class RequestDemand:
    """Facts about a request before it is served, for its charge."""

    model: str
    body: dict[str, Any]  # as sent, parsed
    num_prompt_bytes: int  # of the body without its media
    num_media_bytes: int  # of the media that the body holds
    takes_stream_options: bool = True  # as in completions; other streams report their usage unasked

    @property
    def num_tokens(self) -> int:
        """Estimated tokens: the prompt's text at four bytes each, the longest requested answer, and log
        probabilities of both.
        """
        answer = max(count_of(self.body, name) or 0 for name in ANSWER_FIELDS)
        num_answers = (count_of(self.body, "n") or 1) * num_prompts(self.body)
        prompt, answers = self.num_prompt_bytes // BYTES_PER_TOKEN, answer * num_answers
        return prompt + answers + self.cost.extra_tokens(prompt, answers)

    @property
    def cost(self) -> AnswerCost:
        return AnswerCost.of(self.body, self.num_prompt_bytes)

    def charges(self, limits: KeyLimits) -> tuple[RateCharge, ...]:
        """Return the charges before the request is served: per rate, at most a minute's worth."""
        costs = {REQUESTS: 1, TOKENS: self.num_tokens, MEDIA_BYTES: self.num_media_bytes}
        return tuple(RateCharge(rate, limit, min(costs[rate], limit)) for rate, limit in limits.rates.items())


def limit_reached(limits: KeyLimits, reached: str, wait_s: float) -> RequestError:
    """Return the 429 with `Retry-After`; `reached` is a rate, or the requests in flight."""
    if reached == CONCURRENT:
        message = f"this API key may have {limits.max_concurrent_requests} requests in flight at once"
        return RequestError(429, "rate_limit_exceeded", message, None)
    message = (
        f"this API key may use {limits.rates[reached]} {_SHOWN[reached]};"
        f" try again in {format_duration(wait_s)}"
    )
    return RequestError(429, "rate_limit_exceeded", message, None, retry_after_s=max(wait_s, 0.001))


def rate_headers(limits: KeyLimits, levels: Mapping[str, float]) -> dict[str, str]:
    """Return rate limit headers as OpenAI's clients read them; `levels` is the used part of each rate."""
    headers: dict[str, str] = {}
    for rate in (REQUESTS, TOKENS):
        limit = limits.rates.get(rate)
        if limit is None or rate not in levels:
            continue
        headers[f"x-ratelimit-limit-{rate}"] = str(limit)
        headers[f"x-ratelimit-remaining-{rate}"] = str(max(0, math.floor(limit - levels[rate] + 1e-6)))
        headers[f"x-ratelimit-reset-{rate}"] = format_duration(levels[rate] * 60 / limit)
    return headers


def format_duration(seconds: float) -> str:
    """Format rounded up as OpenAI's headers: `1h2m3s`, `6m0s`, `7.66s`, `120ms`, `0s`."""
    ms = math.ceil(max(0.0, seconds) * 1000 - 1e-6)
    if 0 < ms < 1000:
        return f"{ms}ms"
    hours, ms = divmod(ms, 3_600_000)
    minutes, ms = divmod(ms, 60_000)
    text = f"{hours}h" if hours else ""
    text += f"{minutes}m" if hours or minutes else ""
    return f"{text}{ms / 1000:.10g}s"
