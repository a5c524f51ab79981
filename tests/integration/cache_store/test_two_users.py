"""Another user of the machine can neither connect nor map, whatever of the permissions gets lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.stores import StoreProcess
from triptych_common.protocol.store import Ping

OTHER_UID = 65534
TRY = """
import mmap, os, socket, sys
uid, run_dir, pid = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.setgroups([]); os.setgid(uid); os.setuid(uid)
def connect():
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        client.connect(run_dir + "/store.sock")
        try:
            client.sendall(b"\\0\\0\\0\\x37" + b'{"kind":"hello","seq":1,"version":1,"client":"stranger"}')
            return "answered" if client.recv(1000) else "refused"
        except (ConnectionResetError, BrokenPipeError):
            return "refused"
def map_file(path, flags=os.O_RDWR):
    fd = os.open(path, flags)
    mmap.mmap(fd, 4096, prot=mmap.PROT_READ)
    return "mapped"
def map_of_process():
    for name in os.listdir(f"/proc/{pid}/fd"):
        map_file(f"/proc/{pid}/fd/{name}")
    return "mapped"
for attempt in (connect, lambda: map_file(run_dir + "/region"),
                lambda: map_file(run_dir + "/region", os.O_RDONLY), map_of_process):
    try:
        print(attempt())
    except PermissionError:
        print("denied")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_a_stranger_gets_nothing(daemon: StoreProcess, run_dir: Path) -> None:
    def attempt() -> list[str]:
        command = [sys.executable, "-I", "-c", TRY, str(OTHER_UID), str(run_dir), str(daemon.pid)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.split()

    assert attempt() == ["denied"] * 4  # the directory
    run_dir.chmod(0o755)
    assert attempt() == ["denied"] * 4  # socket and region themselves
    (run_dir / "store.sock").chmod(0o666)
    assert attempt() == ["refused", "denied", "denied", "denied"]  # the kernel names the user
    run_dir.chmod(0o700)
    assert "client of another user refused" in daemon.log()
    daemon.connect("owner").request(Ping(seq=0))
    assert daemon.stats().num_sessions == 2
