"""The fabric's pods run: an agent beside its store, with mutual TLS from a Secret."""

import pytest

from tests.integration.kubernetes.node import NODE_NAME, Node
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(1800)]

SEEN_LIMIT_S = 60.0


def test_the_agent_owns_its_key_alone(agents_node: Node) -> None:
    """Files of a Secret belong to root, and an agent refuses a key that others can read."""
    listed = agents_node.pods["fabric"].execute("stat", "--format", "%n %a %u", "/keys/tls.key").stdout
    assert listed.split() == ["/keys/tls.key", "600", "10001"]


def wait_registered(node: Node) -> None:
    """Wait until Redis has the agent and its store, by the names of the node."""
    agent = node.pods["fabric"]
    names = {f"store-{NODE_NAME}", f"fabric-{NODE_NAME}"}

    def status() -> str:
        return agent.execute("triptych", "status", "--json").stdout

    wait_until(lambda: all(each in status() for each in names), SEEN_LIMIT_S, status)


def test_the_agent_is_registered_by_the_names_of_node_and_pod(agents_node: Node) -> None:
    """The agent's store is registered too; the agent reaches it by the node's memory."""
    wait_registered(agents_node)


def test_the_store_can_be_replaced_under_its_agent(agents_node: Node) -> None:
    agents_node.replace("cache-store")
    agents_node.wait_ready()
    assert agents_node.pods["fabric"].passes("readinessProbe")


def test_redis_can_be_replaced_under_its_agent(agents_node: Node) -> None:
    """The new one has another address and holds nothing."""
    before = agents_node.pods["redis"].name
    assert agents_node.replace("redis").name != before
    agents_node.wait_ready()
    wait_registered(agents_node)
