"""What `up` shows of a system that is ready."""

import json
from pathlib import Path

import pytest

from triptych_cli.commands import lifecycle
from triptych_cli.supervisor.state import SystemStatus


@pytest.mark.parametrize(
    ("config", "has_image"),
    [({"vision_config": {}}, True), ({"audio_config": {}}, False), ({"hidden_size": 8}, False)],
)
def test_the_example_asks_about_an_image_where_the_model_takes_one(
    config: dict[str, object], has_image: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    status = SystemStatus(
        supervisor_pid=1, endpoint="http://127.0.0.1:8000/v1", redis_url="", deployment="default",
        store_socket="", traces_dir="", model=str(tmp_path), services=(),
    )  # fmt: skip
    lifecycle._show_endpoint(status)
    shown = capsys.readouterr().out
    assert ("$IMAGE" in shown) == has_image
    body = shown.partition("-d '")[2].rpartition("'")[0].replace("'\"$IMAGE\"'", "xx")
    assert json.loads(body)["messages"][0]["content"][-1]["type"] == "text"


def test_the_example_names_a_model_of_the_hub_as_it_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    status = SystemStatus(
        supervisor_pid=1, endpoint="http://127.0.0.1:8000/v1", redis_url="", deployment="default",
        store_socket="", traces_dir="", model="no-such/model-3B", services=(),
    )  # fmt: skip
    lifecycle._show_endpoint(status)
    assert '"model": "model-3B"' in capsys.readouterr().out
