"""The containers, from build to `down --volumes`. The tests build on each other, in this order."""

import base64
import io
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionContentPartParam, ChatCompletionUserMessageParam
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.integration.compose.project import UP_LIMIT_S, Compose
from tests.integration.compose.prometheus_image import files_with_prometheus
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.slow]

Samples = Callable[[int], tuple[bytes, str]]

MODEL = "digits-vl"
PROMPT = "read the digits"
MAX_TOKENS = 32
RESTART_LIMIT_S = 300.0
SCRAPE_LIMIT_S = 90.0  # several of the 15 s between two scrapes
JOBS = ("gateway", "encoder", "prefill_decode", "cache_store")
KILL_MAIN_PROCESS = "kill -KILL $(cat /proc/1/task/1/children)"  # process 1 is the init
COUNT_ENCODES = 'cat /var/lib/triptych/traces/*.jsonl | grep -c \'"name":"encoder.encode"\''


@pytest.fixture
def client(system: Compose) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", timeout=60, max_retries=0) as made:
        yield made


def messages(*pngs: bytes) -> list[ChatCompletionUserMessageParam]:
    urls = [f"data:image/png;base64,{base64.b64encode(png).decode()}" for png in pngs]
    images: list[ChatCompletionContentPartParam] = [
        {"type": "image_url", "image_url": {"url": url}} for url in urls
    ]
    return [{"role": "user", "content": [*images, {"type": "text", "text": PROMPT}]}]


def read_digits(client: openai.OpenAI, *pngs: bytes) -> str:
    """The answer about `pngs`, not streamed."""
    answer = client.chat.completions.create(
        model=MODEL, messages=messages(*pngs), temperature=0, max_tokens=MAX_TOKENS
    )
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message.content or ""


def padded(png: bytes, num_bytes: int) -> bytes:
    """The same pixels in a file that is `num_bytes` larger."""
    comment, file = PngInfo(), io.BytesIO()
    comment.add_text("Comment", "x" * num_bytes)
    Image.open(io.BytesIO(png)).save(file, "PNG", pnginfo=comment)
    return file.getvalue()


def num_encodes(system: Compose) -> int:
    """Encodes so far, by the spans in the volume with the traces."""
    return int(system.execute("gateway", "sh", "-c", COUNT_ENCODES).stdout or 0)


def encoders(system: Compose) -> set[str]:
    """Names of the encoders that the gateway knows."""
    report = httpx.get(f"{system.url}/health/ready", timeout=10).json()
    return {each["instance"] for each in report["instances"] if each["role"] == "encode"}


def test_digits_are_read_through_the_published_port(client: openai.OpenAI, samples: Samples) -> None:
    num_right = 0
    for number in (4, 5, 7):
        png, expected = samples(number)
        answer = read_digits(client, png)
        assert re.fullmatch(r"\d( \d)*", answer), answer
        num_right += answer == expected
    assert num_right >= 2


def test_the_same_image_again_is_not_encoded_again(
    system: Compose, client: openai.OpenAI, samples: Samples
) -> None:
    png, _ = samples(8)
    before = num_encodes(system)
    first = read_digits(client, png)
    wait_until(lambda: num_encodes(system) == before + 1, 15, "the first encode's span")
    again = client.chat.completions.create(
        model=MODEL, messages=messages(png), temperature=0, max_tokens=MAX_TOKENS, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in again if chunk.choices]
    assert "".join(pieces) == first
    assert len(pieces) > 1
    time.sleep(1.0)  # spans are written within 0.2 s
    assert num_encodes(system) == before + 1


def test_a_large_image_is_fetched_from_the_gateway(client: openai.OpenAI, samples: Samples) -> None:
    """Too large to travel in the job: the encoder asks the gateway's container, by its host name."""
    png, _ = samples(6)
    large = padded(png, 300_000)
    assert read_digits(client, large) == read_digits(client, png)


@pytest.mark.parametrize("service", ["gateway", "cache_store"])
@pytest.mark.parametrize("module", ["torch", "vllm"])
def test_light_images_hold_no_engine(system: Compose, service: str, module: str) -> None:
    done = system.execute(service, "python", "-c", f"import {module}")
    assert f"No module named '{module}'" in done.stderr


@pytest.mark.parametrize("service", ["gateway", "cache_store", "encoder", "prefill_decode"])
def test_services_can_do_little(system: Compose, service: str) -> None:
    assert system.execute(service, "id", "-u").stdout.strip() == "10001"
    for path in ("/", "/opt/triptych", "/model"):
        assert system.execute(service, "touch", f"{path}/probe").returncode != 0, path
    status = system.execute(service, "cat", "/proc/self/status").stdout
    assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
    assert "NoNewPrivs:\t1" in status


def test_only_the_gateway_is_published(system: Compose) -> None:
    for service in ("redis", "cache_store", "encoder", "prefill_decode"):
        ports = system.inspect(service)["NetworkSettings"]["Ports"] or {}
        assert not any(ports.values()), service
    bindings = system.inspect("gateway")["NetworkSettings"]["Ports"]["8000/tcp"]
    assert {each["HostIp"] for each in bindings} == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("service", "command", "shown"),
    [
        ("encoder", ["status"], "prefill_decode-"),
        ("gateway", ["streams", "lag"], "encode-jobs:"),
        ("encoder", ["store", "stats"], "bytes free"),
        ("cache_store", ["store", "ls"], "ready"),
    ],
)
def test_commands_work_in_the_containers(
    system: Compose, service: str, command: list[str], shown: str
) -> None:
    done = system.execute(service, "triptych", *command)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


def test_a_trace_is_drawn_in_a_container(system: Compose, samples: Samples) -> None:
    body = {"model": MODEL, "messages": messages(samples(3)[0]), "max_tokens": 4}
    answer = httpx.post(f"{system.url}/v1/chat/completions", json=body, timeout=60)
    request_id = answer.headers["X-Request-Id"]

    def is_drawn() -> bool:
        return "encoder.encode" in system.execute("gateway", "triptych", "trace", request_id).stdout

    wait_until(is_drawn, 15, "the trace with the encoder's spans")


def test_the_stores_metrics_are_relayed_and_it_keeps_without_a_network(system: Compose) -> None:
    profile = ("--profile", "observability")
    system.run(*profile, "up", "--detach", "--no-deps", "--no-build", "store-metrics")
    fetch = (
        "import urllib.request as u; print(u.urlopen('http://store-metrics:9464/metrics').read().decode())"
    )
    try:
        wait_until(
            lambda: "triptych_store_bytes" in system.execute("gateway", "python", "-c", fetch).stdout,
            15,
            "the relay answers",
        )
        assert list(system.inspect("cache_store")["NetworkSettings"]["Networks"]) == ["none"]
    finally:
        system.run(*profile, "rm", "--stop", "--force", "store-metrics")


def test_prometheus_scrapes_every_service(
    system: Compose, client: openai.OpenAI, samples: Samples, tmp_path: Path
) -> None:
    """As the profile starts it, with the project's own configuration and rules."""
    files = files_with_prometheus(tmp_path)
    profile = (*files, "--profile", "observability")
    url = f"http://127.0.0.1:{system.env['TRIPTYCH_PROMETHEUS_PORT']}/api/v1/query"

    def values(expr: str) -> dict[str, float]:
        """Of each job."""
        try:
            samples = httpx.get(url, params={"query": expr}, timeout=10).json()["data"]["result"]
        except httpx.TransportError:
            return {}  # it starts
        return {each["metric"]["job"]: float(each["value"][1]) for each in samples}

    system.run(*profile, "up", "--detach", "--no-deps", "--no-build", "store-metrics", "prometheus")
    try:
        wait_until(lambda: values("up") == dict.fromkeys(JOBS, 1.0), SCRAPE_LIMIT_S, f"{JOBS} are up")
        read_digits(client, padded(samples(11)[0], 1))
        seals = "sum by (job) (triptych_store_seals_total)"
        wait_until(lambda: values(seals).get("cache_store", 0) > 0, SCRAPE_LIMIT_S, "the store's seals")
    finally:
        system.run(*profile, "rm", "--stop", "--force", "store-metrics", "prometheus")


def test_a_second_encoder_has_a_name_of_its_own(
    system: Compose, client: openai.OpenAI, samples: Samples
) -> None:
    system.up("--no-build", "--no-recreate", "--scale", "encoder=2")
    wait_until(lambda: len(encoders(system)) == 2, 15, "two encoders in the registry")
    assert read_digits(client, samples(9)[0], samples(10)[0]).count(" / ") == 1


def test_a_dead_encoder_is_restarted_and_the_other_goes_on(
    system: Compose, client: openai.OpenAI, samples: Samples
) -> None:
    system.execute("encoder", "sh", "-c", KILL_MAIN_PROCESS)
    read_digits(client, samples(11)[0])

    def is_back() -> bool:
        container = system.inspect("encoder")
        return bool(container["RestartCount"] >= 1 and container["State"]["Health"]["Status"] == "healthy")

    wait_until(is_back, RESTART_LIMIT_S, "the killed encoder healthy again")
    assert len(encoders(system)) == 2


def test_down_leaves_nothing(system: Compose) -> None:
    system.run("down", "--volumes", limit_s=UP_LIMIT_S)
    assert system.leftovers() == []
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{system.url}/health/live", timeout=60)


def test_configurations_are_valid(compose: Compose) -> None:
    """What cannot be run everywhere (GPU, images of the tracing profile) is at least well-formed."""
    for arguments in (
        ["--profile", "tracing"],
        ["--profile", "observability"],
        ["--file", "compose.yaml", "--file", "compose.gpu.yaml", "--profile", "observability"],
        ["--file", "compose.yaml", "--file", "compose.gpu.yaml"],
    ):
        compose.run(*arguments, "config", "--quiet")
