"""The commands that look into a running system, against one that `up` started."""

from tests.support.real.system import System, image_part


def test_status_shows_every_service_ready(system: System) -> None:
    answer = system.command("status")
    assert answer.returncode == 0
    for name in ("redis", "cache_store-0", "encoder-0", "prefill_decode-0", "gateway-0"):
        assert name in answer.stdout


def test_status_shows_what_each_engine_computes_on(system: System) -> None:
    """Cores that are shared by a policy, or threads that the environment of the tests sets."""
    lines = [line.split() for line in system.command("status").stdout.splitlines()]
    first = lines.index(["engine", "role", "computes", "on", "shared", "by", "core", "policy"]) + 1
    engines = {words[0]: words[1:] for words in lines[first : first + 2]}
    assert engines.keys() == {"encoder-0", "prefill_decode-0"}
    for words in engines.values():
        assert words[-2:] in (["cores", "text_first"], ["none", "-"]), words


def test_up_refuses_a_second_system_in_the_same_place(system: System) -> None:
    answer = system.command("up")
    assert answer.returncode == 1
    assert "running already" in answer.stderr


def test_a_request_is_seen_by_trace_store_and_streams(system: System, strips) -> None:  # type: ignore[no-untyped-def]
    strip = strips.held_out_strips(1, 2, seed=777)[0]
    answer = system.ask([image_part(strip.png), {"type": "text", "text": "read the digits"}])
    system.trace(answer.request_id, "encoder.encode", "prefill.inject")
    drawn = system.command("trace", answer.request_id)
    assert drawn.returncode == 0
    assert {"chat", "encoder.encode", "prefill.inject"} <= set(drawn.stdout.split())
    assert "until the first token, ms: body" in drawn.stdout
    assert "float32" in system.command("store", "ls").stdout
    assert "encode-jobs" in system.command("streams", "lag").stdout
    assert "no dead letters" in system.command("streams", "dead").stdout


def test_logs_knows_a_service_by_its_short_name(system: System) -> None:
    assert system.command("logs", "gateway", "-n", "5").stdout
    unknown = system.command("logs", "nobody")
    assert unknown.returncode == 1
    assert "gateway-0" in unknown.stderr
