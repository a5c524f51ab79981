"""Table of a system's registered instances, for systems that `up` has not started."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from triptych_cli.commands.clients import message_bus
from triptych_cli.console import plain_table
from triptych_common.coordination import Registry
from triptych_common.protocol.messages import InstanceRecord, Role

SERVING = frozenset({Role.PREFILL_DECODE, Role.ENCODE_PREFILL_DECODE})
PREFILLING = frozenset({Role.PREFILL, Role.ENCODE_PREFILL})
SHOWN_DIGITS = 12  # of a namespace's digest: enough to distinguish them


async def read_records() -> list[InstanceRecord]:
    """Records of the living instances, by name.

    Raises:
        TriptychError: Redis cannot be reached.
    """
    async with message_bus() as bus:
        return await Registry(bus).list_instances()


def instance_table(records: Sequence[InstanceRecord]) -> Table:
    """One row per registered instance."""
    table = plain_table("instance", "role", "state", "model", "namespace", "url")
    for record in records:
        state = "draining" if record.draining else "ready"
        digest = (record.namespace_digest or "-")[:SHOWN_DIGITS]
        row = (record.instance, record.role.value, state, record.model or "-", digest, record.url or "-")
        table.add_row(*(escape(each) for each in row))
    return table


def can_serve(records: Sequence[InstanceRecord]) -> bool:
    """True if the instances can together answer requests."""
    roles = {each.role for each in records if not each.draining}
    return bool(roles & SERVING) or (bool(roles & PREFILLING) and Role.DECODE in roles)
