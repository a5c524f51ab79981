"""What an encoder does between its engine's start and end.

    working --stop--> draining -> deregistered -> inboxes deleted

Draining: announced; jobs that have not begun are handed back, for another encoder to take at once; those
that have are finished, and their pins kept until the requesters' last words, for `drain_timeout_s` at most.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any

from triptych_common.bus import AsyncBus, Delivery, drop_idle_consumers
from triptych_common.coordination import Registration, Registry, SingleFlight
from triptych_common.domain.errors import StoreUnavailableError, TriptychError
from triptych_common.protocol.messages import InstanceRecord, Role
from triptych_common.protocol.names import ENCODERS_GROUP
from triptych_common.runtime import StopSignal
from triptych_common.telemetry.logs import get_logger
from triptych_encoder.engine.encoding import Encoder
from triptych_encoder.jobs.job import JobRunner
from triptych_encoder.jobs.job_leases import JobLeases
from triptych_encoder.jobs.ledger import Ledger
from triptych_encoder.jobs.media_source import MediaSource, new_media_client
from triptych_encoder.jobs.replies import ReplyListener
from triptych_encoder.jobs.reporter import Reporter
from triptych_encoder.settings import EncoderSettings
from triptych_encoder.store.store_client import StoreClient
from triptych_encoder.store.transport_selector import TransportSelector
from triptych_vllm_connector.host.platform import has_region
from triptych_vllm_connector.host.slab_watch import Ask, SlabWatch

log = get_logger(__name__)

HEALTH_CHECK_S = 1.0  # vLLM tells of a dead engine only when asked


async def work(
    settings: EncoderSettings, digest: str, engine: Encoder, stop: StopSignal, ask: Ask | None = None
) -> None:
    """The life around a running engine: register, work until `stop` is set, drain.

    Args:
        digest: of the namespace that the engine encodes for.
        ask: asks its worker for the store's memory on its GPU, where it has one of its own.

    Raises:
        TriptychError: the engine, the store or Redis cannot be used.
    """
    is_mappable = await asyncio.to_thread(has_region, settings.store_socket, settings.instance)
    async with SlabWatch.open(
        settings.store_socket, settings.instance, settings.transport, has_region=is_mappable, ask=ask
    ) as slab:
        await _work(settings, digest, engine, stop, slab)


async def _work(
    settings: EncoderSettings, digest: str, engine: Encoder, stop: StopSignal, slab: SlabWatch
) -> None:
    names = settings.names
    store_lost = asyncio.Event()
    hand_over = await StoreClient.connect(
        settings.store_socket, settings.instance, digest, lambda error: store_lost.set()
    )
    bus = await AsyncBus.connect(settings.redis_url, settings.deployment, client_name=settings.instance)
    ledger = Ledger()
    record = InstanceRecord(
        instance=settings.instance,
        boot_id=uuid.uuid4().hex,
        role=Role.ENCODE,
        model=settings.model.rstrip("/").rsplit("/", 1)[-1],
        namespace_digest=digest,
        width=engine.width,
        dtype=engine.dtype,
        max_item_embeds=engine.max_num_tokens,
        store=hand_over.store,
        num_slots=settings.num_slots,
        **slab.fields(),
    )
    registry = Registry(bus)
    pairing = TransportSelector(lambda: slab.own, digest, registry, lambda: hand_over.slab)
    try:
        async with new_media_client() as http:
            reporter = Reporter(bus, names, settings.instance)
            lease_s = settings.takeover_idle_ms / 1000
            flights = JobLeases(SingleFlight(bus), reporter, ledger, settings.instance, lease_s)
            runner = JobRunner(
                engine,
                MediaSource(http, settings.max_media_bytes),
                hand_over,
                flights,
                ledger,
                settings.instance,
                digest,
                pairing.memories,
                settings.engine_timeout_s,
            )
            listener = ReplyListener(bus, names, settings.instance, ledger, hand_over)
            await drop_idle_consumers(bus, names.encode_jobs(digest), ENCODERS_GROUP)
            async with registry.keep_registered(record) as registration:
                log.info(
                    "encoder ready",
                    num_slots=settings.num_slots,
                    transports=[each.value for each in slab.own.transports],
                )
                tasks = [
                    listener.run(), flights.run(), _watch_health(engine, store_lost), slab.run(registration)
                ]  # fmt: skip
                await _until_stopped(settings, digest, bus, registration, runner, listener, tasks, stop)
            await registry.clear_inboxes(settings.instance)
    finally:
        await hand_over.close()
        await bus.close()


async def _until_stopped(
    settings: EncoderSettings,
    digest: str,
    bus: AsyncBus,
    registration: Registration,
    runner: JobRunner,
    listener: ReplyListener,
    tasks: Sequence[Coroutine[Any, Any, None]],
    stop: StopSignal,
) -> None:
    """Take jobs until `stop`, and drain. `tasks` run beside it, until everything is settled."""
    try:
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(each) for each in tasks]
            drained_by = await _take_jobs(settings, digest, bus, registration, runner, stop)
            try:
                async with asyncio.timeout_at(drained_by):
                    await listener.wait_settled()
            except TimeoutError:
                log.warning("requesters had not said their last word in time")
            for other in others:
                other.cancel()
    except* TriptychError as failures:
        raise _first(failures) from None


def _first(failures: BaseException) -> BaseException:
    """Of what may be a group of groups: those of the jobs have one of their own."""
    while isinstance(failures, BaseExceptionGroup):
        failures = failures.exceptions[0]
    return failures


async def _watch_health(engine: Encoder, store_lost: asyncio.Event) -> None:
    """Until cancelled.

    Raises:
        TriptychError: the engine died, also while idle, or the store went away.
    """
    while not store_lost.is_set():
        await engine.check_health()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(store_lost.wait(), HEALTH_CHECK_S)
    raise StoreUnavailableError("the cache store went away")


async def _take_jobs(
    settings: EncoderSettings,
    digest: str,
    bus: AsyncBus,
    registration: Registration,
    runner: JobRunner,
    stop: StopSignal,
) -> float:
    """Take a job of the namespace whenever a slot is free; on `stop` finish those that have begun.

    What has not begun, or is not finished in time, is handed back: another encoder has it at once.

    Returns:
        When the time to drain is over, on the event loop's clock.
    """
    consumer = bus.consumer(
        settings.names.encode_jobs(digest),
        group=ENCODERS_GROUP,
        consumer=settings.instance,
        prefetch=settings.num_slots,
        min_idle_ms=settings.takeover_idle_ms,
        max_deliveries=settings.max_deliveries,
        on_dead_letter=runner.give_up,
    )
    loop = asyncio.get_running_loop()
    drained_by = float("inf")
    running: dict[asyncio.Task[None], Delivery] = {}
    try:
        async with asyncio.timeout(None) as limit, consumer, asyncio.TaskGroup() as group:

            async def end_on_stop() -> None:
                nonlocal drained_by
                await stop.wait()
                consumer.stop()
                drained_by = loop.time() + settings.drain_timeout_s
                limit.reschedule(drained_by)
                log.info("draining", num_jobs=len(running))
                waiting = {task: each for task, each in running.items() if not runner.has_begun(each)}
                for task in waiting:
                    task.cancel()
                await registration.announce_draining()
                await asyncio.gather(*waiting, return_exceptions=True)
                for delivery in waiting.values():
                    await delivery.hand_back()  # of a task that had not run yet

            group.create_task(end_on_stop())
            async for delivery in consumer:
                if stop.is_set:
                    await delivery.hand_back()
                    continue
                task = group.create_task(runner.run(delivery))
                running[task] = delivery
                task.add_done_callback(running.pop)
    except TimeoutError:
        log.warning("jobs in hand were not finished in time, and were handed back")
    return drained_by
