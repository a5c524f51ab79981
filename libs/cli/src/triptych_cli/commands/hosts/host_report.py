"""Hosts of a system, from its instances' records. Pure.

An instance belongs to the host that its record names. An agent represents its store, and reports the store's
contents and its links.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from triptych_cli.console import format_bytes, plain_table
from triptych_common.protocol.messages import FabricLink, InstanceRecord, Role

UNKNOWN = "-"


@dataclass(frozen=True)
class HostReport:
    """One host by name; instances that name none belong to the host `-`."""

    name: str
    instances: tuple[InstanceRecord, ...]

    @property
    def agents(self) -> tuple[InstanceRecord, ...]:
        return tuple(each for each in self.instances if each.role is Role.FABRIC)

    @property
    def stores(self) -> tuple[str, ...]:
        return tuple(sorted({each.store for each in self.instances if each.store is not None}))


def hosts_of(records: Sequence[InstanceRecord]) -> list[HostReport]:
    """Hosts of these instances, sorted by name."""
    of_stores = {each.store: each.host for each in records if each.store and each.host}
    names = {each.instance: each.host or of_stores.get(each.store or "") or UNKNOWN for each in records}
    return [
        HostReport(name, tuple(each for each in records if names[each.instance] == name))
        for name in sorted(set(names.values()))
    ]


def links_of(records: Sequence[InstanceRecord]) -> list[tuple[str, FabricLink]]:
    """Links of all agents, each with its source store."""
    return [
        (each.store or each.instance, link)
        for each in records
        if each.fabric_load is not None
        for link in each.fabric_load.links
    ]


def is_spread(records: Sequence[InstanceRecord]) -> bool:
    """True if there are, or may be, several hosts: not every container is one."""
    stores = {each.store for each in records if each.store is not None}
    return len(stores) > 1 or any(each.role is Role.FABRIC for each in records)


def hosts_table(hosts: Sequence[HostReport]) -> Table:
    """Table of hosts: instances, store, and the store's contents."""
    numbers = ("entries", "bytes", "free")
    table = plain_table("host", "store", "instances", "agent", *numbers, right=numbers)
    for host in hosts:
        counted = Counter(
            each.role.value + (" (draining)" if each.draining else "")
            for each in host.instances
            if each.role is not Role.FABRIC
        )
        instances = ", ".join(f"{number} {role}" for role, number in sorted(counted.items())) or UNKNOWN
        row = [
            host.name,
            ", ".join(host.stores) or UNKNOWN,
            instances,
            _addresses(host.agents),
            *_held(host.agents),
        ]
        table.add_row(*(escape(each) for each in row))
    return table


def links_table(links: Sequence[tuple[str, FabricLink]]) -> Table:
    numbers = ("in flight", "sent", "rate")
    table = plain_table(
        "from store", "to store", "transport", "state", *numbers, "last failure", right=numbers
    )
    for source, link in links:
        rate = f"{format_bytes(int(link.bytes_per_s))}/s" if link.bytes_per_s is not None else UNKNOWN
        state = "up" if link.is_up else "down"
        row = (
            source, link.target, link.transport.value, state, str(link.num_in_flight),
            format_bytes(link.num_bytes), rate, describe_failure(link),
        )  # fmt: skip
        table.add_row(*(escape(each) for each in row))
    return table


def describe_failure(link: FabricLink) -> str:
    """Text such as `unreachable, 12 s ago`."""
    if link.failure is None:
        return ""
    return link.failure if link.failed_s is None else f"{link.failure}, {link.failed_s:.0f} s ago"


def as_json(records: Sequence[InstanceRecord]) -> dict[str, Any]:
    """Hosts and links as plain data, for programs."""
    return {
        "hosts": [
            {
                "host": host.name,
                "stores": [
                    {"store": each.store, "agent": each.instance, **_load_json(each)} for each in host.agents
                ],
                "instances": [_instance_json(each) for each in host.instances],
            }
            for host in hosts_of(records)
        ],
        "links": [{"source": source, **link.model_dump(mode="json")} for source, link in links_of(records)],
    }


def _instance_json(record: InstanceRecord) -> dict[str, Any]:
    fields = {"instance", "role", "store", "url", "model", "namespace_digest", "draining"}
    return record.model_dump(mode="json", include=fields | {"unserved_modalities"})


def _load_json(agent: InstanceRecord) -> dict[str, Any]:
    if agent.fabric_load is None:
        return {}
    return agent.fabric_load.model_dump(mode="json", exclude={"links"})


def _addresses(agents: Sequence[InstanceRecord]) -> str:
    found = [f"{each.fabric.host}:{each.fabric.port}" for each in agents if each.fabric is not None]
    return ", ".join(found) or "none"


def _held(agents: Sequence[InstanceRecord]) -> tuple[str, str, str]:
    loads = [each.fabric_load for each in agents if each.fabric_load is not None]
    if not loads:
        return UNKNOWN, UNKNOWN, UNKNOWN
    return (
        str(sum(each.num_entries for each in loads)),
        format_bytes(sum(each.entries_num_bytes for each in loads)),
        format_bytes(sum(each.free_num_bytes for each in loads)),
    )
