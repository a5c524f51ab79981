"""The instances of a system, as they have registered: what is known of one that `up` has not started."""

from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from triptych_cli.commands.clients import message_bus
from triptych_cli.console import plain_table
from triptych_common.coordination import Registry
from triptych_common.protocol.messages import Role

SERVING = frozenset({Role.PREFILL_DECODE, Role.ENCODE_PREFILL_DECODE})
PREFILLING = frozenset({Role.PREFILL, Role.ENCODE_PREFILL})
SHOWN_DIGITS = 12  # of a namespace's digest: enough to distinguish them


@dataclass(frozen=True)
class RegisteredInstances:
    """The table, and whether one of them takes requests."""

    table: Table
    can_serve: bool


async def read_instances() -> RegisteredInstances:
    """One row per instance that lives.

    Raises:
        TriptychError: Redis cannot be reached.
    """
    async with message_bus() as bus:
        records = await Registry(bus).list_instances()
    table = plain_table("instance", "role", "state", "model", "namespace", "url")
    for record in records:
        state = "draining" if record.draining else "ready"
        digest = (record.namespace_digest or "-")[:SHOWN_DIGITS]
        row = (record.instance, record.role.value, state, record.model or "-", digest, record.url or "-")
        table.add_row(*(escape(each) for each in row))
    roles = {each.role for each in records if not each.draining}
    can_serve = bool(roles & SERVING) or (bool(roles & PREFILLING) and Role.DECODE in roles)
    return RegisteredInstances(table, can_serve)
