"""Autoscaler: starts and stops instances of this host by the gateways' gauges of waiting work.

    encoders          seconds of one encoder that wait / seconds that they may wait, rounded up
    language models   ready ones + the same quotient, since what they compute already is not in the signal;
                      one fewer while nothing waits and the others' KV caches have room for its share

A number that is higher than the present one counts at once; a lower one when none higher was wanted for the
cooldown. Figures: docs/operations/scaling.md#settings-of-a-scaler, from `benchmarks/simulate.py scale-out`.

The same gauges as on Kubernetes (docs/operations/scaling.md). Without an answer of a gateway nothing changes.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

from triptych_cli.roles import Bounds
from triptych_cli.supervisor.readiness import RegistryReader
from triptych_cli.supervisor.supervisor import Supervisor
from triptych_common.protocol.messages import Role
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

TOLERANCE = 0.1  # of the present number, by which the quotient may differ without a change
COOLDOWN_STARTS = 2.0
KV_BOUND = 0.7  # use of KV caches up to which fewer instances are enough
INTERVAL_S = 1.0
SCRAPE_TIMEOUT_S = 2.0
RETRY_S = 30.0  # after a start that failed
ENCODER, PREFILL_DECODE = "encoder", "prefill_decode"
ENCODE_GAUGE = "triptych_gateway_encode_seconds_waiting"
MODEL_GAUGES = ("triptych_gateway_prefill_seconds_waiting", "triptych_gateway_decode_seconds_waiting")


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """Settings of a scaler."""

    target_s: float  # that work may wait
    cooldown_s: float  # without work for an instance, after which it ends; at least
    cooldown_starts: float = COOLDOWN_STARTS  # and at least that many times the start of one


@dataclass(frozen=True, slots=True)
class StageSignal:
    """Work that waits for a stage."""

    waiting_s: float  # seconds of one instance
    kv_usage: float | None = None  # mean over the instances, 0 to 1; None: unknown, or there is none


@dataclass(slots=True)
class StageScaler:
    """Scaler of one stage; `now` is in monotonic seconds."""

    rules: ScalingRules
    is_encode: bool
    _wanted: deque[tuple[float, int]] = field(default_factory=deque)

    def decide(
        self,
        signal: StageSignal,
        num_present: int,
        num_ready: int,
        start_s: float,
        bounds: Bounds,
        now: float,
    ) -> int:
        """Return how many instances there should be.

        Args:
            num_present: instances that run or start.
            num_ready: of them, those that work.
            start_s: seconds that the start of one takes, as measured; 0 before the first.
        """
        if not self._wanted:
            self._wanted.append((now, num_present))  # nothing ends before a cooldown was observed
        wanted = bounds.clamp(
            self._encoders(signal, num_present) if self.is_encode else self._models(signal, num_ready)
        )
        self._wanted.append((now, wanted))
        cooldown_s = max(self.rules.cooldown_s, self.rules.cooldown_starts * start_s)
        while self._wanted[0][0] < now - cooldown_s:
            self._wanted.popleft()
        highest = max(number for _, number in self._wanted)
        return bounds.clamp(min(highest, max(num_present, bounds.clamp(wanted))))

    def _encoders(self, signal: StageSignal, num_present: int) -> int:
        quotient = signal.waiting_s / self.rules.target_s
        if num_present and abs(quotient - num_present) <= TOLERANCE * num_present:
            return num_present
        return math.ceil(quotient)

    def _models(self, signal: StageSignal, num_ready: int) -> int:
        quotient = signal.waiting_s / self.rules.target_s
        if quotient > TOLERANCE:
            return num_ready + math.ceil(quotient)
        if num_ready < 2 or signal.waiting_s > 0 or signal.kv_usage is None:
            return num_ready
        is_enough = signal.kv_usage * num_ready / (num_ready - 1) < KV_BOUND
        return num_ready - 1 if is_enough else num_ready


class Autoscaler:
    """Scaler of one supervisor's stages; `run` must run."""

    def __init__(self, supervisor: Supervisor, rules: ScalingRules) -> None:
        self._supervisor = supervisor
        self._scalers = {
            stage: StageScaler(rules, is_encode=stage == ENCODER) for stage in (ENCODER, PREFILL_DECODE)
        }
        self._retry_at: dict[str, float] = {}

    async def run(self) -> None:
        """Scale all stages with a range by what the gauges show, for ever."""
        status = self._supervisor.status()
        async with (
            httpx.AsyncClient(trust_env=False, timeout=SCRAPE_TIMEOUT_S) as client,
            RegistryReader(status.redis_url, status.deployment) as registry,
        ):
            while True:
                stages = [each for each in self._scalers if self._supervisor.bounds_of(each).is_range]
                if stages and not self._supervisor.commands.locked():
                    await self._scale(stages, client, registry)
                await asyncio.sleep(INTERVAL_S)

    async def _scale(
        self, stages: Sequence[str], client: httpx.AsyncClient, registry: RegistryReader
    ) -> None:
        texts = await self._scrape(client)
        if not texts:
            return
        kv_usage = await _kv_usage(registry) if PREFILL_DECODE in stages else None
        signals = signals_of(texts, kv_usage)
        if self._supervisor.commands.locked():  # a command came meanwhile
            return
        for stage in stages:
            self._scale_stage(stage, signals[stage], time.monotonic())

    async def _scrape(self, client: httpx.AsyncClient) -> list[str]:
        """Return the metrics of all gateways here; empty if one of them does not answer."""
        texts = []
        for url in self._supervisor.gateway_metrics_urls():
            try:
                answer = await client.get(url)
            except httpx.TransportError:
                return []
            if answer.status_code != httpx.codes.OK:
                return []
            texts.append(answer.text)
        return texts

    def _scale_stage(self, stage: str, signal: StageSignal, now: float) -> None:
        state = self._supervisor.stage_state(stage)
        if state.has_failed_start:
            self._retry_at.setdefault(stage, now + RETRY_S)
        number = self._scalers[stage].decide(
            signal,
            state.num_present,
            state.num_ready,
            state.start_s,
            self._supervisor.bounds_of(stage),
            now,
        )
        if number == state.num_present:
            return
        if number > state.num_present and now < self._retry_at.get(stage, now):
            return
        self._retry_at.pop(stage, None)
        log.info(
            "stage scaled",
            stage=stage, number=number, before=state.num_present, waiting_s=round(signal.waiting_s, 2),
        )  # fmt: skip
        self._supervisor.scale_to(stage, number)


def signals_of(texts: Sequence[str], kv_usage: float | None = None) -> Mapping[str, StageSignal]:
    """Return the signals in the metrics of all gateways; a prefill_decode has one queue for both gauges."""
    sums = dict.fromkeys((ENCODE_GAUGE, *MODEL_GAUGES), 0.0)
    for text in texts:
        lines = (line for line in text.splitlines(keepends=True) if line.startswith(tuple(sums)))
        for family in text_string_to_metric_families("".join(lines)):
            for sample in family.samples:
                if sample.labels.get("role", Role.PREFILL_DECODE) == Role.PREFILL_DECODE:
                    sums[sample.name] += sample.value
    return {
        ENCODER: StageSignal(sums[ENCODE_GAUGE]),
        PREFILL_DECODE: StageSignal(max(sums[each] for each in MODEL_GAUGES), kv_usage),
    }


async def _kv_usage(registry: RegistryReader) -> float | None:
    """Return the mean use of the prefill_decodes' KV caches, or None."""
    records = await registry.list_instances() or []
    loads = [each.load for each in records if each.role is Role.PREFILL_DECODE and each.load is not None]
    used = [each.kv_usage for each in loads if each.kv_usage is not None]
    return sum(used) / len(used) if used else None
