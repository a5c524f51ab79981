"""Runs the clients' scripts. Their packages are large, and nothing else needs them."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[3]
PACKAGES = {"langchain_client": ("langchain_openai", "langchain-openai"), "litellm_client": ("litellm",) * 2}
INSTALL_LIMIT_S = 300
LIMIT_S = 120


def is_installed(script: str) -> bool:
    return importlib.util.find_spec(PACKAGES[script][0]) is not None


def install(script: str, folder: Path) -> None:
    """Into `folder` alone, in the versions of constraints.txt."""
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        f"--constraint={ROOT / 'constraints.txt'}", f"--target={folder}", PACKAGES[script][1],
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False)
    if done.returncode:
        pytest.skip(f"{PACKAGES[script][1]} cannot be installed: {done.stderr.strip()[-300:]}")


def run_client(script: str, folder: Path | None, *arguments: str) -> dict[str, Any]:
    """What the client got. `folder`: where its packages are; None: in this environment."""
    env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    env["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet for prices
    if folder is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), env.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{script}.py"), *arguments],
        env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    got: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return got
