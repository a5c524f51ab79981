"""What `up` and `demo` refuse before anything starts, in one sentence that names the remedy."""

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from triptych_cli.roles import RoleCounts
from triptych_cli.settings import DEFAULT_MODEL
from triptych_cli.system import preflight
from triptych_cli.system.machine import LaunchError
from triptych_cli.system.resolved_options import MIB, ResolvedOptions

QWEN = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "text_config": {"hidden_size": 2048}}
LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64}


def options(model: str = str(DEFAULT_MODEL), **others: Any) -> ResolvedOptions:
    return ResolvedOptions(model, model.startswith("/"), 8000, **others)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A hub with an empty cache; `answer` is what it says to each request, or how it cannot be reached."""
    state: dict[str, Any] = {"asked": []}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("VLLM_USE_MODELSCOPE", raising=False)

    def answer(request: httpx.Request) -> httpx.Response:
        state["asked"].append(request)
        if isinstance(state["answer"], Exception):
            raise state["answer"]
        response: httpx.Response = state["answer"]
        return response

    made = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **each: made(transport=httpx.MockTransport(answer), **each))
    return state


def test_the_demo_model_passes() -> None:
    preflight.preflight(options())


@pytest.mark.parametrize("model", ["models/digits-vl/", "a/b/c", "digits vl"])
def test_a_typo_in_a_path_that_no_hub_can_have_is_told_without_a_network(
    hub: dict[str, Any], model: str
) -> None:
    with pytest.raises(LaunchError, match="there is no folder"):
        preflight.preflight(options(model))
    assert hub["asked"] == []


def test_a_hub_that_cannot_be_reached_is_told_with_the_remedy(hub: dict[str, Any]) -> None:
    hub["answer"] = httpx.ConnectError("Name or service not known")
    with pytest.raises(
        LaunchError, match=r"(?s)neither a folder here.*not known.*restore the network, or copy"
    ):
        preflight.preflight(options("Qwen/Qwen2.5-VL-3B-Instruct"))


@pytest.mark.parametrize(
    ("status", "remedy"), [(404, "correct --model"), (401, "HF_TOKEN"), (403, "terms on its page")]
)
def test_a_model_that_the_hub_does_not_give_is_told_with_the_remedy(
    hub: dict[str, Any], status: int, remedy: str
) -> None:
    hub["answer"] = httpx.Response(status, headers={"x-error-message": "because"})
    with pytest.raises(LaunchError, match=rf"(?s){status}, because.*{remedy}"):
        preflight.preflight(options("who/knows"))


def test_the_hub_is_asked_for_the_revision_and_with_the_token_of_the_engines_options(
    hub: dict[str, Any],
) -> None:
    hub["answer"] = httpx.Response(200, json=QWEN)
    arguments = ("--revision", "v2", "--hf-token=t0ken")
    preflight.preflight(options("who/knows", encoder_args=arguments))
    assert "/who/knows/resolve/v2/config.json" in str(hub["asked"][0].url)
    assert hub["asked"][0].headers["Authorization"] == "Bearer t0ken"


def test_a_model_in_the_hubs_cache_needs_no_network(hub: dict[str, Any], tmp_path: Path) -> None:
    repo = tmp_path / "models--who--knows"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("c0ffee")
    (repo / "snapshots" / "c0ffee").mkdir(parents=True)
    (repo / "snapshots" / "c0ffee" / "config.json").write_text(json.dumps(QWEN))
    assert preflight.model_config(options("who/knows")) == QWEN
    assert hub["asked"] == []


def test_a_config_that_is_not_json_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LaunchError, match="is not JSON"):
        preflight.preflight(options(str(tmp_path)))


def test_a_model_of_text_alone_with_an_encoder_is_told_the_way_without(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(LaunchError, match="--encoders 0 --local-encode fallback"):
        preflight.preflight(options(str(tmp_path)))
    preflight.preflight(options(str(tmp_path), counts=RoleCounts(prefill_decodes=1)))


@pytest.mark.parametrize(
    "architecture", ["Qwen2_5_VLForConditionalGeneration", "LlavaForConditionalGeneration", "NewForCausalLM"]
)
def test_a_model_with_media_or_an_unknown_one_is_not_taken_for_text_alone(architecture: str) -> None:
    assert not preflight.is_text_only({"architectures": [architecture]})


@pytest.mark.parametrize(
    ("url", "reason"),
    [("redis://u:geheim@127.0.0.1:{closed}", "connect"), ("http://u:geheim@x", "must start with redis://"),
     ("unix:///nowhere/redis.sock", "No such file")],
)  # fmt: skip
def test_a_redis_that_cannot_be_used_is_told_without_its_password(url: str, reason: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(LaunchError, match=rf"(?si){reason}.*--redis-url") as raised:
            preflight.preflight(options(redis_url=url.format(closed=unused.getsockname()[1])))
    assert "geheim" not in str(raised.value)


@pytest.mark.parametrize(
    ("region_mib", "counts", "arguments", "fits"),
    [
        (8, RoleCounts(encoders=1, prefill_decodes=1), (), True),  # 2048 rows of 2048 values of 2 bytes
        (7, RoleCounts(encoders=1, prefill_decodes=1), (), False),
        (8, RoleCounts(encoders=1, prefill_decodes=1, prefills=1, decodes=1), (), False),
        (8, RoleCounts(encoders=1, prefill_decodes=1), ("--max-num-batched-tokens=8192",), False),
        (8, RoleCounts(encoders=1, prefill_decodes=1), ("--max-model-len", "4096"), False),  # one item
        (64, RoleCounts(encoders=1, prefill_decodes=1), ("--max-model-len=128000",), True),
        (1, RoleCounts(encode_prefill_decodes=1), (), True),  # hands nothing over
    ],
)
def test_a_region_smaller_than_the_encoder_caches_is_refused(
    tmp_path: Path, region_mib: int, counts: RoleCounts, arguments: tuple[str, ...], fits: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    wanted = options(
        str(tmp_path), region_bytes=region_mib * MIB, counts=counts, prefill_decode_args=arguments
    )
    if fits:
        preflight.preflight(wanted)
    else:
        with pytest.raises(LaunchError, match=r"--region-bytes \d+ or more"):
            preflight.preflight(wanted)
