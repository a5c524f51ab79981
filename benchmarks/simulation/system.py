"""A deployment put together, and the way of a request through it.

    arrival → gateway → (media → job → encoder → sizes) → front → engine → tokens → gateway
                                        └→ seal → pinned ┘

Deterministic: one `random.Random(seed)` for arrivals and kinds, and simpy's order of events.
"""

import random
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

from simulation.encoders import EncoderModel
from simulation.engines import EngineModel
from simulation.parameters import Deployment, StageTimes
from simulation.requests import Item, Request
from simulation.results import Results, Shares
from simulation.servers import Server
from simulation.workload import Arrivals, RequestKind, Stream, Workload
from triptych_cli.roles import Bounds
from triptych_cli.supervisor.autoscaler import ScalingRules, StageScaler, StageSignal
from triptych_common.domain.fair_queue import DEFAULT_KEY
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import Modality
from triptych_gateway.encode.encode_backlog import EncodeBacklog, EncodeWork

DRAIN_S = 60.0
DIGEST = "one"  # namespace of all items


@dataclass
class GatewayModel:
    """One process. `in_flight`: its own requests at each engine, by which it routes."""

    loop: Server
    threads: Server
    in_flight: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True)
class Scaling:
    """Encoders that come and go: `rules` are applied every `interval_s`, a start takes `start_s`."""

    rules: ScalingRules
    bounds: Bounds
    interval_s: float
    start_s: float


class DeploymentModel:
    """One deployment: one Redis, gateways, a store for each host, encoders, engines."""

    def __init__(
        self,
        env: simpy.Environment,
        times: StageTimes,
        deployment: Deployment,
        hosts: list[tuple[int, int]],
        scaling: Scaling | None = None,
    ) -> None:
        self._env, self._times, self._deployment = env, times, deployment
        gateway, num_gateways = times.gateway, deployment.gateways_per_host * len(hosts)
        self.gateways = [
            GatewayModel(Server(env), Server(env, gateway.media_threads)) for _ in range(num_gateways)
        ]
        self.redis = Server(env)
        self.stores = [Server(env) for _ in hosts]
        self.links = [Server(env) for _ in hosts]  # of each host, inwards
        self.jobs = simpy.Store(env)
        self.encoders = [
            self._encoder(host)
            for host, (num_encoders, _) in enumerate(hosts)
            for _ in range(0 if deployment.is_monolith else num_encoders)
        ]
        self._scaling, self._num_starting = scaling, 0
        self.backlog = EncodeBacklog()  # the gateway's own: what it predicts is what is scaled by
        self.encoder_s = 0.0  # seconds of all encoders, from the beginning of their starts
        if scaling is not None:
            while len(self.encoders) > scaling.bounds.low:
                self.encoders.pop().end()
            env.process(self._scale(scaling))
        self.engines = [
            EngineModel(env, times, deployment, host, self._stream)
            for host, (_, num_engines) in enumerate(hosts)
            for _ in range(num_engines)
        ]
        self.num_in_flight = 0
        self._next_gateway = 0
        self._reader_host: dict[int, int] = {}  # by id of a living item
        if not deployment.is_monolith:
            env.process(self._beat())

    def serve(self, request: Request) -> Generator[simpy.Event, Any, None]:
        """Process a request from arrival to its last token."""
        self.num_in_flight += 1
        request.gateway = self._next_gateway
        self._next_gateway = (self._next_gateway + 1) % len(self.gateways)
        gateway = self.gateways[request.gateway]
        number = min(range(len(self.engines)), key=lambda n: (gateway.in_flight[n], n))
        engine = self.engines[number]
        gateway.in_flight[number] += 1
        if request.items and not self._deployment.is_monolith:
            yield from self._order_items(request, gateway, engine)
        else:
            yield self._loop(gateway, self._times.gateway.request_s)
        self._loop(gateway, self._times.gateway.request_rest_s)
        front = self._times.engine.front_s + self._times.engine.front_token_s * request.num_prompt
        yield engine.front.done(front)
        if self._deployment.is_monolith:
            for item in request.items:
                yield engine.preprocess(item)
                item.pinned.succeed()
        engine.submit(request)
        yield request.ended
        gateway.in_flight[number] -= 1
        self.num_in_flight -= 1
        yield self._env.timeout(max(0.0, request.ended_s - self._env.now))

    # ---- encoders --------------------------------------------------------------------------------
    def _encoder(self, host: int) -> EncoderModel:
        times = self._times
        return EncoderModel(
            self._env, times.encoder, self._deployment, self.jobs, host,
            shares_core=times.shares_core, row_bytes=times.row_bytes,
            publish=self._publish_sizes, seal=self._seal,
        )  # fmt: skip

    def _scale(self, scaling: Scaling) -> Generator[simpy.Event, Any, None]:
        scaler = StageScaler(scaling.rules, is_encode=True)
        while True:
            num_ready, now = len(self.encoders), self._env.now
            signal = StageSignal(self.backlog.waiting_s(DIGEST, lambda mm_hash: True, now))
            present = num_ready + self._num_starting
            number = scaler.decide(signal, present, num_ready, scaling.start_s, scaling.bounds, now)
            for _ in range(number - present):
                self._env.process(self._start_encoder(scaling.start_s))
            for _ in range(min(present - number, num_ready)):
                self.encoders.pop().end()
            self.encoder_s += max(number, present - num_ready) * scaling.interval_s
            yield self._env.timeout(scaling.interval_s)

    def _start_encoder(self, start_s: float) -> Generator[simpy.Event, Any, None]:
        self._num_starting += 1
        yield self._env.timeout(start_s)
        self._num_starting -= 1
        self.encoders.append(self._encoder(0))

    # ---- images ------------------------------------------------------------------------------------
    def _order_items(
        self, request: Request, gateway: GatewayModel, engine: EngineModel
    ) -> Generator[simpy.Event, Any, None]:
        costs, redis = self._times.gateway, self._times.redis
        for item in request.items:
            yield gateway.threads.done(costs.media_s + costs.media_row_s * item.rows)
        yield self._loop(gateway, costs.request_s + costs.item_s * len(request.items))
        num_new = sum(not item.is_known for item in request.items)
        self._loop(gateway, costs.item_rest_s * num_new)
        store = self._times.store
        for item in request.items:
            self._reader_host[id(item)] = engine.host
            self.stores[engine.host].work(store.command_s * store.item_commands)
            if item.is_known:
                self.redis.work(redis.command_s * redis.known_item_commands)
                item.sized.succeed()
                item.pinned.succeed()
            else:
                self._env.process(self._send_job(item))
        yield self._env.all_of([item.sized for item in request.items])

    def _send_job(self, item: Item) -> Generator[simpy.Event, Any, None]:
        redis = self._times.redis
        self.backlog.begin_item(_hash_of(item), DIGEST, DEFAULT_KEY, EncodeWork(Modality.IMAGE, item.rows))
        yield self.redis.done(redis.command_s * redis.item_commands, extra_s=redis.hop_s)
        yield self.jobs.put(item)

    def _publish_sizes(self, item: Item) -> simpy.Event:
        return self._env.process(self._after(self._times.redis.hop_s, item.sized))

    def _seal(self, item: Item, host: int) -> simpy.Event:
        costs = self._times.encoder
        encode_s = costs.step_s + costs.row_s * item.rows
        self.backlog.complete_item(_hash_of(item), encode_s, len(self.encoders), self._env.now)
        return self._env.process(self._hand_over(item, host))

    def _hand_over(self, item: Item, host: int) -> Generator[simpy.Event, Any, None]:
        times, reader = self._times, self._reader_host.pop(id(item))
        yield self._env.timeout(times.encoder.seal_s)
        if reader != host:
            num_bytes = item.rows * times.row_bytes
            if self._deployment.link_bytes_per_s:
                yield self.links[reader].done(num_bytes / self._deployment.link_bytes_per_s)
            else:  # written once, read once
                yield self.redis.done(2 * num_bytes * times.redis.byte_s)
        yield self._env.timeout(times.engine.wake_s)
        item.pinned.succeed()

    def _after(self, seconds: float, event: simpy.Event) -> Generator[simpy.Event, Any, None]:
        yield self._env.timeout(seconds)
        event.succeed()

    # ---- the rest ------------------------------------------------------------------------------------
    def _loop(self, gateway: GatewayModel, seconds: float) -> simpy.Event:
        """Work on the gateway's loop. Where it has no core of its own, the engines' do it too, in
        equal parts."""
        if self._times.shares_core:
            cores = [each.engine for each in self.encoders] + [each.core for each in self.engines]
            for core in cores:
                core.work(seconds / len(cores))
        return gateway.loop.done(seconds)

    def _stream(self, gateway: int, chunks: int, reply_s: float) -> float:
        """Time at which the gateway has passed on the chunks of one step."""
        return self.gateways[gateway].loop.work(chunks * self._times.gateway.chunk_s) + reply_s

    def _beat(self) -> Generator[simpy.Event, Any, None]:
        redis = self._times.redis
        num_instances = len(self.encoders) + len(self.engines) + len(self.gateways)
        while True:
            self.redis.work(num_instances * redis.beat_commands * redis.command_s)
            yield self._env.timeout(1.0)


def simulate(
    times: StageTimes,
    deployment: Deployment,
    workload: Workload,
    *,
    seed: int = 0,
    warm_s: float = 0.0,
    scaling: Scaling | None = None,
) -> Results:
    """Plays the workload; requests that arrive in its first `warm_s` are not counted.

    It ends when all are answered, or `DRAIN_S` after the last arrival: under more load than the deployment
    can bear the queues only grow.
    """
    env, rng = simpy.Environment(), random.Random(seed)
    hosts = list(deployment.hosts)
    parts = [hosts] if deployment.is_whole else [[host] for host in hosts]
    cells = [DeploymentModel(env, times, deployment, part, scaling) for part in parts]
    results = Results(warm_s=warm_s, end_s=workload.seconds)

    def choose_cell() -> DeploymentModel:
        return min(cells, key=lambda cell: cell.num_in_flight / len(cell.engines))

    def serve_one(kind: RequestKind) -> Generator[simpy.Event, Any, None]:
        request = _request(env, times, kind, rng, deployment.is_monolith)
        yield from choose_cell().serve(request)
        results.add(request, times.client_s)

    def client(kind: RequestKind) -> Generator[simpy.Event, Any, None]:
        while env.now < workload.seconds:
            yield from serve_one(kind)
            yield env.timeout(times.client_s)

    def source(stream: Stream) -> Generator[simpy.Event, Any, None]:
        yield env.timeout(stream.begins_s)
        while True:
            is_poisson = stream.arrivals is Arrivals.POISSON
            yield env.timeout(rng.expovariate(stream.rate) if is_poisson else 1.0 / stream.rate)
            if env.now >= min(workload.seconds, stream.ends_s):
                return
            results.num_arrived += env.now >= warm_s
            sending.append(env.process(serve_one(stream.kind)))

    sending: list[simpy.Process] = []
    sources: list[simpy.Process] = []
    for stream in workload.streams:
        if stream.arrivals is Arrivals.CLOSED:
            sources += [env.process(client(stream.kind)) for _ in range(stream.num_clients)]
        else:
            sources.append(env.process(source(stream)))
    env.run(until=workload.seconds)
    results.shares = _shares(cells, workload.seconds)
    results.encoder_s = (
        sum(cell.encoder_s for cell in cells) if scaling else workload.seconds * (deployment.num_encoders)
    )
    last = env.timeout(DRAIN_S)
    env.run(until=last | (env.all_of(sources) & env.all_of(sending)))
    results.num_unanswered = sum(cell.num_in_flight for cell in cells)
    return results


def _request(
    env: simpy.Environment, times: StageTimes, kind: RequestKind, rng: random.Random, is_monolith: bool
) -> Request:
    words = round(kind.num_text_words * times.tokens_per_word + times.template_tokens)
    before = round(words * kind.text_before_share)
    items, ends, at = [], [], before
    for _ in range(kind.num_images):
        is_known = not is_monolith and kind.known_share > 0 and rng.random() < kind.known_share
        items.append(Item(kind.rows_per_image, is_known, env.event(), env.event()))
        at += kind.rows_per_image
        ends.append(at)
    return Request(
        kind=kind, arrived_s=env.now, num_prompt=at + words - before, num_output=kind.num_output_tokens,
        items=items, item_ends=ends, gateway=0, ended=env.event(),
    )  # fmt: skip


def _shares(cells: list[DeploymentModel], seconds: float) -> Shares:
    def of(servers: list[Server]) -> float:
        return max((min(1.0, server.utilisation(seconds)) for server in servers), default=0.0)

    def mean(servers: list[Server]) -> float:
        return sum(min(1.0, s.utilisation(seconds)) for s in servers) / len(servers) if servers else 0.0

    engines = [engine for cell in cells for engine in cell.engines]
    return Shares(
        gateway=of([g.loop for cell in cells for g in cell.gateways]),
        media=of([g.threads for cell in cells for g in cell.gateways]),
        redis=of([cell.redis for cell in cells]),
        store=of([store for cell in cells for store in cell.stores]),
        link=of([link for cell in cells for link in cell.links]),
        encoder=mean([e.engine for cell in cells for e in cell.encoders]),
        hottest_encoder=of([e.engine for cell in cells for e in cell.encoders]),
        preprocess=mean([e.threads for cell in cells for e in cell.encoders]),
        engine=min(1.0, sum(e.load_s for e in engines) / (seconds * len(engines))),
    )


def _hash_of(item: Item) -> MmHash:
    return MmHash(str(id(item)))
