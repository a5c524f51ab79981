"""What headers say of where a request may go: whose count, and what is malformed."""

from ipaddress import ip_network
from typing import Any

import pytest

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import InstanceRecord, Role
from triptych_gateway.access.auth import ANONYMOUS, Caller
from triptych_gateway.endpoints.table import CREATE_RESPONSE
from triptych_gateway.proxy.routing import RoutingHeaders
from triptych_gateway.routing.scheduling.candidates import ServingStage
from triptych_gateway.routing.served_models import ModelsFile, ServedModels
from triptych_gateway.routing.variants import RouteDemand

MODELS = ServedModels(ModelsFile(version_header=True, session_header="X-Chat"))
ROUTER = Caller("router")
NETWORKS = (ip_network("10.1.0.0/16"),)
FRONT_END = RoutingHeaders(ServedModels(), frozenset({"router"}), NETWORKS)
PREFILLER = "x-prefiller-host-port"


def read(
    headers: RoutingHeaders,
    sent: dict[str, str],
    *,
    caller: Caller = ANONYMOUS,
    body: dict[str, Any] | None = None,
    address: str = "192.0.2.1",
    request_id: str = "r",
    inputs: tuple[str, ...] = ("messages", "prompt"),
) -> RouteDemand:
    raw = [(name.lower().encode(), value.encode()) for name, value in sent.items()]
    scope = {"type": "http", "headers": raw, "client": (address, 1)}
    return headers.read(scope, caller, body or {}, inputs, request_id)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def pd(name: str, url: str) -> InstanceRecord:
    return InstanceRecord(instance=name, boot_id="b", role=Role.PREFILL_DECODE, url=url)


def test_a_version_where_the_operator_allows_it() -> None:
    sent = {"X-Triptych-Version": "2"}
    assert read(RoutingHeaders(MODELS), sent).version == "2"
    assert read(FRONT_END, sent, caller=ROUTER).version == "2"
    assert read(RoutingHeaders(ServedModels()), {}).version is None
    with pytest.raises(RequestError) as caught:
        read(RoutingHeaders(ServedModels()), sent)
    assert (caught.value.status_code, caught.value.code) == (403, "header_not_allowed")
    with pytest.raises(RequestError) as caught:
        read(RoutingHeaders(MODELS), {"X-Triptych-Version": "no label"})
    assert (caught.value.status_code, caught.value.code) == (400, "invalid_value")


def test_hosts_count_for_front_ends_alone() -> None:
    sent = {PREFILLER: "a:1"}
    assert not read(RoutingHeaders(MODELS), sent).hosts, "off"
    assert read(FRONT_END, sent, caller=ROUTER).hosts == {ServingStage.PREFILL: {"a:1"}}
    assert read(FRONT_END, sent, address="10.1.2.3").hosts == {ServingStage.PREFILL: {"a:1"}}
    for caller in (ANONYMOUS, Caller("alice")):
        with pytest.raises(RequestError) as caught:
            read(FRONT_END, sent, caller=caller)
        assert (caught.value.status_code, caught.value.code) == (403, "header_not_allowed")
    assert not read(FRONT_END, {"x-encoder-hosts-ports": "e:1"}, caller=ROUTER).hosts


@pytest.mark.parametrize(
    ("sent", "hosts"),
    [
        ({"x-prefiller-host-ports": "A:1, b:2"}, {ServingStage.PREFILL: {"a:1", "b:2"}}),
        ({"x-llm-d-prefiller-host-port": "a:1"}, {ServingStage.PREFILL: {"a:1"}}),
        ({"x-llm-d-prefiller-host-port": "a:1", PREFILLER: "b:1"}, {ServingStage.PREFILL: {"b:1"}}),
        ({"x-data-parallel-host-port": "[FE80::1]:8000"}, {ServingStage.DECODE: {"[fe80::1]:8000"}}),
    ],
)
def test_llm_ds_names(sent: dict[str, str], hosts: dict[ServingStage, set[str]]) -> None:
    assert read(FRONT_END, sent, caller=ROUTER).hosts == hosts


@pytest.mark.parametrize(
    "value", ["a", "a:", ":1", "a:http", "a:123456", ",", "http://a", ",".join(["a:1"] * 65)]
)
def test_no_hosts(value: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(FRONT_END, {PREFILLER: value}, caller=ROUTER)
    assert (caught.value.status_code, caught.value.code) == (400, "invalid_value")


def test_instances_by_their_announced_urls() -> None:
    records = [
        pd("a", "http://a:8000"),
        pd("b", "http://B:8000/base"),
        pd("c", "https://c"),
        pd("d", "http://[fe80::1]:8000"),
        InstanceRecord(instance="e", boot_id="b", role=Role.ENCODE),
    ]
    named = frozenset({"a:8000", "b:8000", "c:443", "[fe80::1]:8000"})
    demand = RouteDemand(hosts={ServingStage.PREFILL: named})
    assert (
        named_by(demand, records) == named_by(demand, records, ServingStage.PREFILL) == ["a", "b", "c", "d"]
    )
    assert len(named_by(demand, records, ServingStage.DECODE)) == len(records)
    both = RouteDemand(hosts={**demand.hosts, ServingStage.DECODE: frozenset({"a:8000"})})
    assert named_by(both, records) == named_by(both, records, ServingStage.DECODE) == ["a"]
    assert len(named_by(RouteDemand(), records)) == len(records)


def named_by(
    demand: RouteDemand, records: list[InstanceRecord], stage: ServingStage = ServingStage.WHOLE
) -> list[str]:
    return [each.instance for each in records if demand.allows(each, stage)]


def test_a_conversation_is_known_by_its_beginning() -> None:
    """The same in its next turns; another one for another caller, another session, another question."""
    headers = RoutingHeaders(MODELS)
    system = {"role": "system", "content": "be brief"}
    parts = user([{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "hello"}])

    def key(body: dict[str, Any], sent: dict[str, str] | None = None, **options: Any) -> bytes:
        return read(headers, sent or {}, body=body, **options).find_session()

    first = key({"messages": [system, user("hello")]})
    answer = {"role": "assistant", "content": "hi"}
    assert key({"messages": [system, parts, answer, user("more")]}, request_id="s") == first
    assert key({"messages": [system, user("bye")]}) != first
    assert key({"messages": [user("hello")]}) != first
    assert key({"messages": [system, user("hello")]}, caller=ROUTER) != first
    by_header = {"x-chat": "7"}
    assert key({"messages": [user("a")]}, by_header) == key({"prompt": "b"}, by_header) != first
    assert key({"prompt": "a" * 300}) == key({"prompt": "a" * 256 + "b"})
    tokens = list(range(300))
    assert key({"prompt": tokens}) == key({"prompt": [tokens[:100], [1]]}) != key({"prompt": tokens[1:]})
    assert key({}, request_id="s") != key({}, request_id="t"), "nothing tells one from another"


@pytest.mark.parametrize("length", [10, 300, 5000])
def test_the_first_turn_of_a_response_may_be_a_string(length: int) -> None:
    headers, text = RoutingHeaders(MODELS), "x" * length

    def key(**body: Any) -> bytes:
        return read(headers, {}, body=body, inputs=CREATE_RESPONSE.inputs).find_session()

    answer = {"role": "assistant", "content": [{"type": "output_text", "text": "hi"}]}
    first = key(input=text, instructions="be brief")
    assert key(input=[user(text), answer, user("more")], instructions="be brief") == first
    parts = [user([{"type": "input_text", "text": text}]), answer, user("more")]
    assert key(input=parts, instructions="be brief") == first
    assert key(input=text) != first
    assert key(input=f"a{text}", instructions="be brief") != first
