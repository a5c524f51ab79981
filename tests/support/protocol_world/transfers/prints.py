"""The part of a fingerprint that is about several stores. `digest` is how values are told apart."""

from collections.abc import Callable
from typing import Any

from tests.support.protocol_world.transfers.agent import AgentActor
from tests.support.protocol_world.transfers.gateway import TransferGateway
from tests.support.protocol_world.transfers.wires import PlayedConnection, Socket
from triptych_fabric.receiver.reception import Reception
from triptych_fabric.sender.push import EntryPush

Digest = Callable[[Any], Any]


def of_agent(agent: AgentActor, digest: Digest, stands: Digest) -> Any:
    return (
        (
            agent.is_up,
            agent.must_end,
            agent.is_frozen,
            agent.num_lives,
            agent.identity.generation,
            agent.announced,
        ),
        sorted(map(stands, agent.loop.all_tasks)),
        [
            (key, sorted(each.orders), sorted((name, _push(push)) for name, push in each.pushes.items()))
            for key, each in sorted(agent.table._transfers.items())
        ],
        sorted(
            (name, hold.num_users, hold.pin_id, hold.sealed.done())
            for name, hold in agent.local._holds.items()
        ),
        (sorted(agent.links._links), sorted(agent.links._dialling)),
        [_socket(each) for each in agent.sockets],
        [
            (peer.sender, [(number, _reception(each)) for number, each in sorted(peer._receptions.items())])
            for peer in agent.peers
        ],
        (agent.budget.num_bytes, len(agent.budget._claims)),
        sorted((number, digest(order)) for number, order in agent.unacked.items()),
        agent.again,
    )


def _push(push: EntryPush) -> Any:
    offer = push._offer
    waits = () if offer is None else (offer.answered, offer.stored)
    return push.has_lost_link, *(each.done() for each in waits)


def _reception(reception: Reception) -> Any:
    return reception._held is not None, reception._received.done(), reception._withdrawn.done()


def _socket(socket: Socket) -> Any:
    return (
        (socket.peer.owner, socket.is_source, socket.is_cut, list(socket.inbox)),
        None if socket.connection is None else _connection(socket.connection),
    )


def _connection(connection: PlayedConnection) -> Any:
    side = connection.side
    sendings = side.chunks._sendings if hasattr(side, "chunks") else {}
    return (
        (len(connection.steps), connection.is_open, connection.is_stopping, list(side._frames)),
        sorted(getattr(side, "_live", ())),
        sorted(getattr(side, "_expected", ())),
        sorted((number, each.position) for number, each in sendings.items()),
    )


def of_gateway(gateway: TransferGateway, digest: Digest) -> Any:
    transfers = gateway.transfers
    return (
        [
            (each.instance, each.boot_id, None if each.fabric is None else each.fabric.generation)
            for each in gateway.view.records
        ],
        [
            (*each.key, each.state.value, each.transfer_id, each.source, each.reason.value, each.due_at,
             (each.num_attempts, each.num_encodes, each.num_extensions), sorted(each.tried), each.failure,
             sorted(each.request_ids))
            for each in transfers.table
        ],
        sorted((name, digest(place)) for name, place in gateway.orders.places._known.items()),
        sorted(gateway.rates._avoided_until.items()),
        (sorted(transfers._targets.items()), len(transfers._unsent), sorted(transfers._boot_ids.items())),
    )  # fmt: skip
