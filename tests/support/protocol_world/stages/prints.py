"""The part of a fingerprint that is about two stages."""

from typing import Any

from tests.support.protocol_world.stages.decode import DecodeActor, Decoding
from tests.support.protocol_world.stages.gateway import StageGateway
from tests.support.protocol_world.stages.prefill import StageConsumer


def of_decode(decode: DecodeActor) -> Any:
    return (
        (decode.is_up, decode.must_end, decode.has_news, decode.is_draining, decode.renders_otherwise),
        (decode.num_lives, decode.beat_at),
        [_decoding(each) for each in decode.live.values()],
        [_decoding(each) for each in decode.aborted.values()],
        sorted(decode.held.items()),
        sorted(decode.refusals._failures.items()),
        list(decode.refusals._reads._named),
        sorted(decode.leases._heartbeats.items()),
    )


def _decoding(each: Decoding) -> Any:
    return (
        each.engine_request_id,
        each.tokens,
        each.state,
        each.computed,
        each.is_broken,
        each.has_begun,
        each.asks,
    )


def of_prefill(consumer: StageConsumer) -> Any:
    return (
        (consumer.num_lives, consumer.renders_otherwise),
        sorted(consumer.pages.owners.items()),
        sorted(consumer.pages.contents.items()),
        sorted(consumer.owner.leases.items()),
        consumer.mailbox,
    )


def of_gateway(gateway: StageGateway) -> Any:
    states = gateway.router._states
    by_turn = sorted(states, key=lambda name: states[name].picked_at)
    return (
        [(each.instance, each.boot_id, each.draining) for each in gateway.view.records],
        [(name, states[name].num_in_flight, states[name].suspect_until) for name in by_turn],
        sorted(gateway.forwarder.held._lives.items()),
        sorted((key, each.is_done, len(each._chunks)) for key, (_, each) in gateway.connections.open.items()),
        gateway._read_at if gateway.next_reading is not None else None,
    )
