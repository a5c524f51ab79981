"""The rendered pods of overlay `cpu` run, answer, survive the kill of each, and leave nothing.

The tests build on each other, in this order. The same pixels in another file are a new image to every cache,
and have the same answer.
"""

import itertools
import re
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.integration.compose.test_compose import Samples, padded, read_digits
from tests.integration.kubernetes.node import Node, attempt
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]

PODS = ("redis", "cache-store", "encoder", "prefill-decode", "gateway")
BACK_LIMIT_S = 120.0
FRESH = itertools.count(1)


@pytest.fixture
def client(node: Node) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"http://{node.pods['gateway'].ip}:8000/v1", api_key="none", timeout=120, max_retries=0
    ) as made:
        yield made


def fresh(png: bytes) -> bytes:
    return padded(png, next(FRESH))


def test_digits_are_read_at_the_port_for_callers(client: openai.OpenAI, samples: Samples) -> None:
    answers = {samples(number)[1]: read_digits(client, samples(number)[0]) for number in (4, 5, 7)}
    assert sum(expected == answer for expected, answer in answers.items()) >= 2, answers


def test_a_large_image_is_fetched_at_the_pods_address(client: openai.OpenAI, samples: Samples) -> None:
    """Too large to travel in the job: the encoder asks the gateway's internal port."""
    png, _ = samples(6)
    assert read_digits(client, padded(png, 300_000)) == read_digits(client, png)


def test_callers_reach_neither_media_nor_metrics(node: Node) -> None:
    ip = node.pods["gateway"].ip
    assert httpx.get(f"http://{ip}:8000/metrics", timeout=30).status_code == 404
    assert "triptych_gateway_requests_total" in httpx.get(f"http://{ip}:8001/metrics", timeout=30).text


@pytest.mark.parametrize(
    ("name", "port"), [("encoder", 9464), ("prefill-decode", 8100), ("cache-store", 9464)]
)
def test_prometheus_finds_metrics_at_the_named_port(node: Node, name: str, port: int) -> None:
    pod = node.pods[name]
    assert port in {each["containerPort"] for each in pod.template.main["ports"]}
    assert "triptych_" in httpx.get(f"http://{pod.ip}:{port}/metrics", timeout=30).text


@pytest.mark.parametrize("name", PODS)
def test_pods_can_do_little(node: Node, name: str) -> None:
    pod = node.pods[name]
    assert pod.execute("id", "-u").stdout.strip() == "10001"
    assert pod.execute("touch", "/probe").returncode != 0
    status = pod.execute("cat", "/proc/self/status").stdout
    assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
    assert "NoNewPrivs:\t1" in status


@pytest.mark.parametrize("name", PODS)
def test_a_living_pod_passes_its_liveness_probe(node: Node, name: str) -> None:
    assert node.pods[name].passes("livenessProbe")


def test_files_are_kept_on_the_claim(node: Node, client: openai.OpenAI, samples: Samples) -> None:
    """The gateway that replaces this one has them."""
    png, _ = samples(3)
    kept = client.files.create(file=("digits.png", png), purpose="vision")
    node.replace("gateway")
    node.wait_ready()
    answer = httpx.get(f"http://{node.pods['gateway'].ip}:8000/v1/files/{kept.id}/content", timeout=30)
    assert answer.content == png


@pytest.mark.parametrize("name", PODS)
def test_a_killed_pod_is_replaced_and_images_are_read_again(node: Node, name: str, samples: Samples) -> None:
    png, expected = samples(4)
    node.replace(name)
    node.wait_ready()

    def reads() -> bool:
        body = {"base_url": f"http://{node.pods['gateway'].ip}:8000/v1", "api_key": "none"}
        with openai.OpenAI(**body, timeout=120, max_retries=0) as client:
            try:
                return read_digits(client, fresh(png)) == expected
            except (openai.InternalServerError, openai.APIConnectionError):
                return False  # 502 and 503: a part is away

    wait_until(reads, BACK_LIMIT_S, f"a new image is read after the kill of {name}")


def test_pods_end_within_their_grace_and_leave_nothing(node: Node) -> None:
    assert (node.memory / "region").exists()
    for name in ("gateway", "encoder", "prefill-decode", "cache-store", "redis"):
        assert node.terminate(node.pods[name]) == 0, name
    assert not [each for each in node.memory.iterdir() if not each.name.startswith("healthcheck-")]
    attempt("network", "rm", node.namespace)
    assert not any(node.leftovers().values())
