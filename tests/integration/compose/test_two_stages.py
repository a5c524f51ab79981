"""compose.epd.yaml: encode, prefill and decode in containers of their own."""

from collections.abc import Callable

import httpx
import openai
import pytest

from tests.integration.compose.project import Compose
from tests.integration.compose.test_compose import read_digits
from tests.support.scraping import Scrape, scrape

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(2400)]  # it may build the images


def test_a_kv_cache_goes_from_one_container_to_another(
    in_two_stages: Compose, samples: Callable[[int], tuple[bytes, str]]
) -> None:
    report = httpx.get(f"{in_two_stages.url}/health/ready", timeout=10).json()
    roles = sorted(each["role"] for each in report["instances"] if each["role"] != "gateway")
    assert roles == ["decode", "encode", "prefill"], report
    with openai.OpenAI(
        base_url=f"{in_two_stages.url}/v1", api_key="none", timeout=60, max_retries=0
    ) as client:
        answers = {samples(number)[1]: read_digits(client, samples(number)[0]) for number in (4, 5, 7)}
    assert sum(expected == answer for expected, answer in answers.items()) >= 2, answers
    assert scrape(in_two_stages.port).total("triptych_gateway_routes_total", way="staged") >= len(answers)
    metrics = (
        "import os, urllib.request as http; "
        "print(http.urlopen(f'http://localhost:{os.environ[\"TRIPTYCH_PORT\"]}/metrics').read().decode())"
    )
    decode = in_two_stages.execute("decode", "python", "-c", metrics)
    found = Scrape.of(decode.stdout)
    assert found.total("vllm:external_prefix_cache_hits_total") > 0, decode.stdout[-2000:] + decode.stderr
