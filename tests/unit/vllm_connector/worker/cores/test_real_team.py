"""Threads of torch's own OpenMP: where they run, and how many, whatever libraries do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from triptych_cli.settings import caller_environment

REAL_SMALLER_TEAM = """
import os, sys
from pathlib import Path
from torch import rand
from triptych_common.cores.board import CoreBoard
from triptych_common.cores.sharing import Work
from triptych_vllm_connector.worker.cores.core_share import CoreShare
from triptych_vllm_connector.worker.cores.core_share import OpenMp

usable = os.sched_getaffinity(0)
first, second = sorted(usable)[:2]
own, borrowed = {first, 254}, {second, 255}  # the kernel leaves out what the machine does not have
openmp = OpenMp.of_process()
text = CoreBoard.open(Path(sys.argv[1]), borrowed)
share = CoreShare("text_first", own, own | borrowed, CoreBoard.open(Path(sys.argv[1]), own), openmp)
share.start_step(Work.ENCODE)
for work, cores in [(Work.PREFILL, own), (Work.IDLE, own | borrowed)] * 8:
    team = openmp.team(4)
    openmp.team(2)  # as an operation that remembers a smaller number: two threads end
    text.publish(work)
    share.start_layer()
    places = {thread: os.sched_getaffinity(thread) for thread in openmp.team(4)}
    assert len(places) == 4 and places.keys() != team, (places, team)
    assert all(place == cores & usable for place in places.values()), (work, cores, places)
"""

REAL_NUMBER = """
import os, sys
from pathlib import Path
os.environ["MKL_NUM_THREADS"] = "1"  # else MKL's number is OpenMP's, at most one for each physical core
import torch
from triptych_common.cores.sharing import Work
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.worker.cores.core_share import CoreShare
from triptych_vllm_connector.worker.cores.core_share import OpenMp

config = ConnectorConfig(
    instance="encoder-0", deployment="test", redis_url="unix:///nowhere", namespace_digest="0" * 16,
    store_socket=Path(sys.argv[1]).with_suffix(""), cores=sorted(os.sched_getaffinity(0))[:1],
)
share = CoreShare.open(config, num_ranks=1)
if share is not None:  # else a quota of this machine leaves nothing to share
    share.start_step(Work.ENCODE)
    torch.rand(1 << 20).exp()
    assert torch.get_num_threads() == OpenMp.of_process().num_threads() == 2
"""

REAL_TEAM = """
import os, sys, threading
from pathlib import Path
import torch
from triptych_common.cores.board import CoreBoard
from triptych_common.cores.sharing import Work
from triptych_vllm_connector.worker.cores.core_share import CoreShare
from triptych_vllm_connector.worker.cores.core_share import OpenMp

host = sorted(os.sched_getaffinity(0))[:2]
openmp = OpenMp.of_process()
assert openmp is not None and openmp.num_threads() == 1, "torch's runtime, with OMP_NUM_THREADS"
text = CoreBoard.open(Path(sys.argv[1]), host[1:])
share = CoreShare("text_first", host[:1], host, CoreBoard.open(Path(sys.argv[1]), host[:1]), openmp)
left, right = torch.rand(300, 300), torch.rand(300, 300)

def compute(work, cores):
    share.start_step(work)
    product = left @ right
    team = openmp.team(openmp.num_threads())
    assert len(team) == (1 if work is Work.DECODE else len(host)), (work, team)
    assert all(os.sched_getaffinity(thread) == set(cores) for thread in team), (work, cores)
    share.end_step()
    return product

everywhere = compute(Work.ENCODE, host)
text.publish(Work.DECODE)
at_home = compute(Work.ENCODE, host[:1])
text.publish(Work.PREFILL)
compute(Work.DECODE, host[:1])
text.close()
again = compute(Work.ENCODE, host)
assert torch.equal(everywhere, at_home) and torch.equal(everywhere, again)
"""

LOWERED = """
import os, sys, threading
from pathlib import Path
from torch import nn
from triptych_common.cores.board import CoreBoard
from triptych_common.cores.usable import nice_stays_inside
from triptych_vllm_connector.worker.cores.core_share import COMPUTE_NICE, CoreShare
from triptych_vllm_connector.worker.cores.core_share import OpenMp

def nice(thread):
    return os.getpriority(os.PRIO_PROCESS, thread)

host = sorted(os.sched_getaffinity(0))[:2]
other = threading.Event(), threading.Event(), []
def wait():
    other[2].append(threading.get_native_id())
    other[0].set()
    other[1].wait()
thread = threading.Thread(target=wait, daemon=True)
thread.start()
other[0].wait()
openmp, before = OpenMp.of_process(), nice(0)
share = CoreShare("text_first", host[:1], host, CoreBoard.open(Path(sys.argv[1]), host[:1]), openmp)
model = nn.Module()
model.layers = nn.ModuleList([nn.Linear(2, 2)])
share.watch_layers(model)
expected = before + COMPUTE_NICE * nice_stays_inside()
assert {nice(each) for each in (*openmp.team(2), *openmp.team(4))} == {expected}
assert nice(other[2][0]) == before
other[1].set()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sock.cores"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: nothing to share")
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(REAL_TEAM, id="runs where it is put, and computes the same"),
        pytest.param(REAL_SMALLER_TEAM, id="though an operation had a smaller team between two moves"),
        pytest.param(LOWERED, id="comes after the process's other threads"),
        pytest.param(REAL_NUMBER, id="has its size though torch sets one at its first operation"),
    ],
)
def test_real_team(path: Path, program: str) -> None:
    """In a process of its own, with torch's OpenMP, as in a worker."""
    environment = {**caller_environment(), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    outcome = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert outcome.returncode == 0, outcome.stderr
