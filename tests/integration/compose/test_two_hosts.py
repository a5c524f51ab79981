"""compose.host.yaml: the encoder in a project on one network, the language model in one on another.

The tests build on each other, in this order. The same pixels in another file are a new image to every cache,
and have the same answer.
"""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.integration.compose.hosts import HostProjects
from tests.integration.compose.project import UP_LIMIT_S, Compose
from tests.integration.compose.test_compose import (
    KILL_MAIN_PROCESS,
    MAX_TOKENS,
    MODEL,
    RESTART_LIMIT_S,
    Samples,
    messages,
    padded,
    read_digits,
)
from tests.support.waiting import wait_until
from triptych_common.telemetry.span_records import SpanRecord

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(2400)]  # it may build the images

ANSWER_LIMIT_S = 90.0  # beyond all that a gateway waits for an item
SEEN_LIMIT_S = 30.0  # spans reach files, and heartbeats Redis, within a second or two
KILL_AFTER_S = 0.5  # the order is with the agent then, and the encode goes on
SERVICES = {
    "a": ("redis", "gateway", "cache_store", "fabric", "encoder"),
    "b": ("cache_store", "fabric", "prefill_decode"),
}
MOVES = ("fabric.transfer", "fabric.receive")  # the gateway's is left out where the answer is sooner
NOT_BROUGHT = "503 transfer_failed"


@pytest.fixture
def client(two_hosts: HostProjects) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{two_hosts.first.url}/v1", api_key="none", timeout=ANSWER_LIMIT_S, max_retries=0
    ) as made:
        yield made


def outcome(client: openai.OpenAI, png: bytes) -> str:
    """The answer; or status and code of an error as OpenAI's API has it."""
    try:
        return read_digits(client, png)
    except openai.APIStatusError as error:
        return f"{error.status_code} {error.code}"


def containers(host: Compose, name: str) -> dict[str, dict[str, Any]]:
    """What the engine reports about each service of host `name`."""
    return {service: host.inspect(service) for service in SERVICES[name]}


def spans_by_name(hosts: HostProjects, request_id: str, wanted: set[str]) -> dict[str, SpanRecord]:
    """The spans of a request, once those that are wanted are there; a failure tells which are."""
    found: dict[str, SpanRecord] = {}

    def are_there() -> bool:
        found.update({span.name: span for span in hosts.trace(request_id)})
        return wanted <= found.keys()

    def case() -> str:
        there = "\n".join(f"  {span}" for span in found.values())
        return (
            f"spans {sorted(wanted - found.keys())} of {request_id}. There are:\n{there}\n"
            f"in these files:\n{hosts.trace_files()}"
        )

    wait_until(are_there, SEEN_LIMIT_S, case)
    return found


def test_digits_are_read_by_a_model_on_another_host_than_the_encoder(
    two_hosts: HostProjects, client: openai.OpenAI, samples: Samples
) -> None:
    report = httpx.get(f"{two_hosts.first.url}/health/ready", timeout=10).json()
    engines = {
        each["instance"].rpartition("-")[0]
        for each in report["instances"]
        if each["role"] in ("encode", "prefill-decode")
    }
    assert engines == {"encoder-a", "prefill_decode-b"}, report
    answers = {samples(number)[1]: read_digits(client, samples(number)[0]) for number in (4, 5, 7)}
    assert all(re.fullmatch(r"\d( \d)*", answer) for answer in answers.values()), answers
    assert sum(expected == answer for expected, answer in answers.items()) >= 2, answers


def test_a_large_image_is_fetched_at_the_first_hosts_address(client: openai.OpenAI, samples: Samples) -> None:
    """Too large to travel in the job."""
    png, _ = samples(6)
    assert read_digits(client, padded(png, 300_000)) == read_digits(client, png)


def test_a_trace_and_the_status_tell_of_the_entry_that_was_moved(
    two_hosts: HostProjects, client: openai.OpenAI, samples: Samples
) -> None:
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=messages(padded(samples(4)[0], 1)), temperature=0, max_tokens=MAX_TOKENS
    )
    request_id = answer.headers["X-Request-Id"]
    found = spans_by_name(two_hosts, request_id, {*MOVES, "encoder.encode", "prefill.inject"})
    assert found["encoder.encode"].instance.startswith("encoder-a-")
    assert found["fabric.transfer"].instance == "fabric-a"
    assert found["fabric.receive"].instance == "fabric-b"
    assert found["prefill.inject"].instance.startswith("prefill_decode-b-")
    for name in MOVES:
        attributes = found[name].attributes
        assert attributes["triptych.source"] == "store-a", found[name]
        assert attributes["triptych.target"] == "store-b", found[name]
        assert attributes["triptych.transport"] == "tcp", found[name]
    (num_bytes,) = {found[name].attributes["triptych.num_bytes"] for name in MOVES}
    assert isinstance(num_bytes, int)
    assert num_bytes > 0

    def is_told() -> bool:
        link = two_hosts.link()
        has_sent = link.get("num_bytes", 0) >= num_bytes and link["transport"] == "tcp" and link["is_up"]
        return bool(has_sent) and two_hosts.num_entries() > 0  # nothing encodes there: all of it was moved

    wait_until(is_told, SEEN_LIMIT_S, "`triptych status` on host b tells of the link and of entries there")


def test_the_hosts_have_neither_a_network_nor_a_volume_in_common(two_hosts: HostProjects) -> None:
    networks, mounts = [], []
    for host, name in ((two_hosts.first, "a"), (two_hosts.second, "b")):
        found = containers(host, name)
        attached = {service: each["NetworkSettings"]["Networks"] for service, each in found.items()}
        assert list(attached.pop("cache_store")) == ["none"], name
        networks.append({each["NetworkID"] for of_one in attached.values() for each in of_one.values()})
        mounts.append([mount for each in found.values() for mount in each["Mounts"]])
    assert [len(each) for each in networks] == [1, 1], networks
    assert networks[0] != networks[1]
    first, second = mounts
    common = {mount["Source"] for mount in first} & {mount["Source"] for mount in second}
    shared = [mount for mount in (*first, *second) if mount["Source"] in common]
    assert all(mount["Type"] == "bind" and not mount["RW"] for mount in shared), shared  # model, key


def test_what_other_hosts_reach_is_published_at_the_hosts_address_alone(two_hosts: HostProjects) -> None:
    for host, name, ports in (
        (two_hosts.first, "a", ("6379/tcp", "7420/tcp", "8001/tcp")),
        (two_hosts.second, "b", ("7420/tcp", "8100/tcp")),
    ):
        published: dict[str, set[str]] = {}
        for each in containers(host, name).values():
            for port, bindings in (each["NetworkSettings"]["Ports"] or {}).items():
                if bindings:
                    published[port] = {binding["HostIp"] for binding in bindings}
        expected = {port: {host.env["TRIPTYCH_HOST_ADDRESS"]} for port in ports}
        assert published == expected | ({"8000/tcp": {"127.0.0.1"}} if name == "a" else {})


def test_an_agent_that_dies_under_a_request_is_restarted_and_moves_the_next_image(
    two_hosts: HostProjects, client: openai.OpenAI, samples: Samples
) -> None:
    png, _ = samples(5)
    expected = read_digits(client, png)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(outcome, client, padded(png, 2))
        time.sleep(KILL_AFTER_S)
        assert not asked.done(), asked.result()
        two_hosts.first.execute("fabric", "sh", "-c", KILL_MAIN_PROCESS)
        assert asked.result() in (expected, NOT_BROUGHT)

    def is_back() -> bool:
        agent = two_hosts.first.inspect("fabric")
        return bool(agent["RestartCount"] >= 1 and agent["State"]["Health"]["Status"] == "healthy")

    wait_until(is_back, RESTART_LIMIT_S, "the killed agent healthy again")
    assert read_digits(client, padded(png, 3)) == expected


def test_an_agent_with_another_key_gets_nothing(
    two_hosts: HostProjects, client: openai.OpenAI, samples: Samples
) -> None:
    """Its host has no encoder: the request fails, within the gateway's limits, until the key is right."""
    png, _ = samples(7)
    expected = read_digits(client, png)
    fresh = padded(png, 4)
    two_hosts.replace_second_agent(two_hosts.other_key)
    try:
        assert outcome(client, fresh) == NOT_BROUGHT
        wait_until(lambda: two_hosts.link().get("failure") == "refused", SEEN_LIMIT_S, "the link's failure")
    finally:
        two_hosts.replace_second_agent(two_hosts.key)
    assert read_digits(client, fresh) == expected


def test_down_leaves_nothing(two_hosts: HostProjects) -> None:
    for host in (two_hosts.second, two_hosts.first):
        host.run("down", "--volumes", limit_s=UP_LIMIT_S)
        assert host.leftovers() == []
