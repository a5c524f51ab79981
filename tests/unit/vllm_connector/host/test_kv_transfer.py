"""Options and environment of engines that hand KV caches over, or take them."""

import warnings
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from triptych_common.domain.engine_args import option_value
from triptych_common.protocol.messages import Role
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.host import kv_transfer
from triptych_vllm_connector.host.engine_options import UnsupportedOptionError, prefill_decode_options
from triptych_vllm_connector.host.kv_transfer import (
    LAST_PORT,
    address_of,
    announced_kv_transfer,
    check_kv_transfer,
    free_port,
    kv_environment,
    kv_transfer_config,
    kv_transfer_options,
    side_channel_host,
)
from triptych_vllm_connector.host.namespace import parse_engine_options
from triptych_vllm_connector.seams.current import seam

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    seam.cli_args()


def options_of(role: Role, *passed_through: str, on_gpu: bool = False, **others: Any) -> list[str]:
    config = ConnectorConfig(
        instance="i",
        deployment="d",
        redis_url="redis://localhost",
        store_socket="/run/store.sock",
        namespace_digest="0" * 64,
        decodes_only=role is Role.DECODE,
    )
    kv_config = kv_transfer_config(role, others.get("lease_s", 30), others.get("options", {}), on_gpu)
    kv_options = kv_transfer_options(kv_config, on_gpu)
    return prefill_decode_options(config, "m", on_gpu, passed_through, kv_options)


def kv_config_in(options: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = orjson.loads(option_value(options, "--kv-transfer-config") or "{}")
    return config


@pytest.mark.parametrize(
    ("role", "kv_role"),
    [(Role.PREFILL, "kv_producer"), (Role.ENCODE_PREFILL, "kv_producer"), (Role.DECODE, "kv_consumer")],
)
def test_each_role_has_its_side_of_the_transfer(role: Role, kv_role: str) -> None:
    config = kv_config_in(options_of(role, lease_s=7))
    assert config["kv_role"] == kv_role
    assert config["kv_load_failure_policy"] == "fail"
    assert config["kv_buffer_device"] == "cpu"
    assert config["kv_connector_extra_config"] == {"kv_lease_duration": 7, "num_threads": 0}


def test_a_gpu_keeps_vllms_own_buffers_and_threads() -> None:
    config = kv_config_in(options_of(Role.PREFILL, on_gpu=True))
    assert "kv_buffer_device" not in config
    assert config["kv_connector_extra_config"] == {"kv_lease_duration": 30}


def test_the_connectors_own_options_win() -> None:
    config = kv_config_in(options_of(Role.DECODE, options={"num_threads": 2, "backends": ["UCX"]}))
    assert config["kv_connector_extra_config"] == {
        "kv_lease_duration": 30,
        "num_threads": 2,
        "backends": ["UCX"],
    }


def test_the_lease_is_set_in_one_place() -> None:
    with pytest.raises(UnsupportedOptionError, match="TRIPTYCH_KV_LEASE_S"):
        options_of(Role.PREFILL, options={"kv_lease_duration": 3})


def test_blocks_on_a_cpu_are_small_unless_the_user_says() -> None:
    assert option_value(options_of(Role.PREFILL), "--block-size") == "32"
    assert option_value(options_of(Role.PREFILL, "--block-size", "16"), "--block-size") == "16"


@pytest.mark.parametrize("on_gpu", [True, False])
def test_one_that_decodes_has_a_scheduler_that_waits_for_no_item(on_gpu: bool) -> None:
    options = options_of(Role.DECODE, on_gpu=on_gpu)
    assert (option_value(options, "--scheduler-cls") or "").endswith(".decode_scheduler.decode_scheduler")
    assert option_value(options, "--ec-manager-config") is None


@pytest.mark.parametrize(
    "own",
    [
        ['--kv-transfer-config={"kv_connector": "NixlConnector", "kv_role": "kv_both"}'],
        ["--kv-transfer-config.kv_role", "kv_both"],
        ["--kv-transfer-config.kv_load_failure_policy=recompute"],
    ],
)
def test_a_transfer_configuration_of_the_users_is_refused(own: list[str]) -> None:
    wanted = kv_transfer_config(Role.DECODE, 30, {}, False)
    parsed = parse_engine_options(["--model=m", *kv_transfer_options(wanted, False), *own])
    with pytest.raises(UnsupportedOptionError, match="TRIPTYCH_KV_CONNECTOR_OPTIONS"):
        check_kv_transfer(parsed.kv_transfer_config, wanted, Role.DECODE)


def test_what_we_set_ourselves_is_accepted() -> None:
    wanted = kv_transfer_config(Role.DECODE, 30, {}, False)
    parsed = parse_engine_options(["--model=m", *kv_transfer_options(wanted, False)])
    check_kv_transfer(parsed.kv_transfer_config, wanted, Role.DECODE)


# ---- environment ---------------------------------------------------------------------------------
def test_by_default_nothing_listens_beyond_loopback() -> None:
    environment = kv_environment("127.0.0.1", 5700, False, ())
    assert environment == {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5700",
        "UCX_TLS": "tcp,self,sm",
        "UCX_NET_DEVICES": "lo",
    }


def test_what_the_user_has_set_for_ucx_wins() -> None:
    environment = kv_environment("10.0.0.5", 5700, False, {"UCX_TLS"})
    assert not {"UCX_TLS", "UCX_NET_DEVICES"} & set(environment)


def test_a_gpu_leaves_the_choice_of_transports_to_ucx() -> None:
    assert "UCX_TLS" not in kv_environment("10.0.0.5", 5700, True, ())


def test_the_side_channel_gets_an_address_and_a_free_port() -> None:
    assert address_of("localhost") in ("127.0.0.1", "::1")
    assert 0 < free_port("127.0.0.1") <= LAST_PORT
    with pytest.raises(UnsupportedOptionError, match="no address of this machine"):
        free_port("192.0.2.1")


@pytest.mark.parametrize(
    ("host", "announced", "expected"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "10.0.0.5", "10.0.0.5"),
        ("0.0.0.0", "127.0.0.1", "127.0.0.1"),  # the HTTP server is announced so, too
        ("0.0.0.0", "machine", "10.0.0.7"),
        ("::", "machine", "10.0.0.7"),
    ],
)
def test_the_side_channel_is_reached_as_the_http_server_is(
    host: str, announced: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _has_own_name_on_loopback(monkeypatch, "10.0.0.7")
    assert side_channel_host(host, announced) == expected


def test_a_machine_without_any_other_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    _has_own_name_on_loopback(monkeypatch, "0.0.0.0")
    with pytest.raises(UnsupportedOptionError, match="TRIPTYCH_ADVERTISED_HOST"):
        side_channel_host("0.0.0.0", "machine")


def _has_own_name_on_loopback(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    real = kv_transfer.address_of
    monkeypatch.setattr(
        kv_transfer, "address_of", lambda host: "127.0.1.1" if host == "machine" else real(host)
    )
    monkeypatch.setattr("vllm.utils.network_utils.get_ip", lambda: found)


# ---- what is announced ---------------------------------------------------------------------------
def vllm_config(**changes: Any) -> Any:
    values = {"block_size": 32, "dtype": "torch.float32", "cache_dtype": "auto", "model": "m", **changes}
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=values["block_size"], cache_dtype=values["cache_dtype"]),
        model_config=SimpleNamespace(model=values["model"], dtype=values["dtype"]),
        speculative_config=None,
    )


def test_equal_engines_are_compatible() -> None:
    one, other = (announced_kv_transfer(vllm_config(), "0" * 64, 30, ("template",)) for _ in range(2))
    assert one == other
    assert one.lease_s == 30


def test_engines_with_other_leases_or_templates_are_not() -> None:
    each = [(30, "template"), (3, "template"), (30, "another"), (30, None)]
    digests = {announced_kv_transfer(vllm_config(), "0" * 64, s, (t,)).compatibility for s, t in each}
    assert len(digests) == len(each)


@pytest.mark.parametrize(
    "change", [{"block_size": 16}, {"dtype": "torch.bfloat16"}, {"cache_dtype": "fp8"}, {"model": "n"}]
)
def test_engines_that_differ_are_not(change: dict[str, Any]) -> None:
    one = announced_kv_transfer(vllm_config(), "0" * 64, 30)
    assert one.compatibility != announced_kv_transfer(vllm_config(**change), "0" * 64, 30).compatibility


def test_another_model_is_not() -> None:
    one, other = (announced_kv_transfer(vllm_config(), digest * 64, 30) for digest in "01")
    assert one.compatibility != other.compatibility
