"""Hosts, stores and links of `status`, from the records of the registry."""

import io

from rich.console import Console
from rich.table import Table

from tests.support.message_samples import instance_record
from triptych_cli.commands.hosts.host_report import (
    as_json,
    describe_failure,
    hosts_of,
    hosts_table,
    is_spread,
    links_of,
    links_table,
)
from triptych_common.protocol.messages import (
    FabricEndpoint,
    FabricLink,
    FabricLoad,
    FabricTransport,
    InstanceRecord,
    Role,
)

LINK = FabricLink(
    target="store-b", transport=FabricTransport.TCP, is_up=True, num_in_flight=2, num_bytes=3 << 20,
    bytes_per_s=100 * 2**20, failure="unreachable", failed_s=12.3,
)  # fmt: skip
AGENT = instance_record(
    "fabric-a",
    Role.FABRIC,
    store="store-a",
    host="a",
    fabric=FabricEndpoint(host="192.0.2.1", port=7420, generation=1),
    fabric_load=FabricLoad(num_entries=5, entries_num_bytes=1024, free_num_bytes=2048, links=(LINK,)),
)
ENCODER = InstanceRecord(instance="encoder-a-0", boot_id="b", role=Role.ENCODE, store="store-a", host="a")
NAMELESS = InstanceRecord(instance="encoder-a-1", boot_id="b", role=Role.ENCODE, store="store-a")
OTHER = instance_record("prefill_decode-b-0", Role.PREFILL_DECODE, store="store-b", host="b", draining=True)
UNKNOWN = InstanceRecord(instance="gateway-0", boot_id="b", role=Role.GATEWAY)
RECORDS = [AGENT, ENCODER, NAMELESS, OTHER, UNKNOWN]


def shown(table: Table) -> list[list[str]]:
    """Rows below the head."""
    text = io.StringIO()
    Console(file=text, width=200).print(table)
    return [line.split() for line in text.getvalue().splitlines()[1:]]


def test_instances_are_of_their_host_or_that_of_their_store() -> None:
    hosts = {host.name: [each.instance for each in host.instances] for host in hosts_of(RECORDS)}
    assert hosts == {
        "-": ["gateway-0"],
        "a": ["fabric-a", "encoder-a-0", "encoder-a-1"],
        "b": ["prefill_decode-b-0"],
    }


def test_one_host_is_none_of_several() -> None:
    assert is_spread(RECORDS)
    assert is_spread([AGENT])
    assert is_spread([ENCODER, OTHER])
    in_containers = [ENCODER, NAMELESS.model_copy(update={"host": "another container"}), UNKNOWN]
    assert not is_spread(in_containers)


def test_each_host_with_its_store_and_what_that_holds() -> None:
    rows = shown(hosts_table(hosts_of(RECORDS)))
    assert rows[1] == ["a", "store-a", "2", "encode", "192.0.2.1:7420", "5", "1.0", "KiB", "2.0", "KiB"]
    assert rows[2] == ["b", "store-b", "1", "prefill-decode", "(draining)", "none", "-", "-", "-"]


def test_each_link_with_its_rate_and_last_failure() -> None:
    assert links_of(RECORDS) == [("store-a", LINK)]
    (row,) = shown(links_table(links_of(RECORDS)))
    assert row == [
        *["store-a", "store-b", "tcp", "up", "2", "3.0", "MiB", "100.0", "MiB/s"],
        *["unreachable,", "12", "s", "ago"],
    ]
    assert describe_failure(LINK.model_copy(update={"failure": None})) == ""


def test_programs_get_the_same_facts() -> None:
    found = as_json(RECORDS)
    (host,) = [each for each in found["hosts"] if each["host"] == "a"]
    assert host["stores"] == [
        {
            "store": "store-a",
            "agent": "fabric-a",
            "num_entries": 5,
            "entries_num_bytes": 1024,
            "free_num_bytes": 2048,
        }
    ]
    assert [each["instance"] for each in host["instances"]] == ["fabric-a", "encoder-a-0", "encoder-a-1"]
    (link,) = found["links"]
    assert (link["source"], link["target"], link["is_up"], link["num_bytes"]) == (
        "store-a",
        "store-b",
        True,
        3 << 20,
    )
