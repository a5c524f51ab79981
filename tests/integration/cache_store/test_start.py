"""The real daemon reports in plain text what is wrong at the start, and leaves nothing behind."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.stores import StoreProcess
from triptych_cache_store.persistence.region_file import RegionFile
from triptych_common.protocol.store import Ping
from triptych_common.region.layout import RegionLayout

MIB = 1 << 20


def refused(run_dir: Path, *options: str, code: int = 1) -> str:
    """What the daemon prints; it must end by itself."""
    arguments = [f"--run-dir={run_dir}", f"--region-bytes={8 * MIB}", *options]
    command = [sys.executable, "-W", "error", "-m", "triptych_cache_store", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (run_dir / "store.sock").exists()
    return ended.stderr


def test_a_region_that_is_too_small(run_dir: Path) -> None:
    assert "65536 bytes have no room for blocks of 65536" in refused(run_dir, "--region-bytes=65536")
    assert not (run_dir / "region").exists()


def test_a_region_that_does_not_fit(run_dir: Path) -> None:
    assert "does not fit into" in refused(run_dir, f"--region-bytes={1 << 50}")
    assert not (run_dir / "region").exists()


def test_a_region_of_another_version_stays(run_dir: Path) -> None:
    content = b"TRIPTYCH\x63" + bytes(9000)
    (run_dir / "region").write_bytes(content)
    (run_dir / "region").chmod(0o600)
    assert "the region has version 99, this store writes 1" in refused(run_dir)
    assert (run_dir / "region").read_bytes() == content


def test_wrong_permissions(run_dir: Path) -> None:
    (run_dir / "region").write_bytes(b"")
    (run_dir / "region").chmod(0o644)
    assert "is not a file of this user alone (want mode 0600)" in refused(run_dir)
    run_dir.chmod(0o755)
    assert "is open to other users; make it so: chmod 700" in refused(run_dir, code=2)
    run_dir.chmod(0o700)


def test_a_directory_that_cannot_be_used(run_dir: Path) -> None:
    assert "cannot use the region /proc/none/region: " in refused(run_dir, "--region-dir=/proc/none")


def test_a_socket_that_cannot_be_made(run_dir: Path) -> None:
    assert "cannot listen at" in refused(run_dir, f"--store-socket={run_dir / ('long' * 40)}")
    assert "cannot serve metrics: " in refused(run_dir, f"--metrics-socket={run_dir / 'none' / 'm'}")
    (run_dir / "in-the-way").write_text("a file")
    assert "it is not a socket" in refused(run_dir, f"--store-socket={run_dir / 'in-the-way'}")
    assert (run_dir / "in-the-way").read_text() == "a file"


def test_a_second_store(daemon: StoreProcess, run_dir: Path) -> None:
    command = [sys.executable, "-m", "triptych_cache_store", f"--run-dir={run_dir}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1
    assert "another store runs on the region" in ended.stderr
    assert daemon.stats().num_sessions == 1


# ---- on a tmpfs of our own -----------------------------------------------------------------------
def on_tmpfs(mount_options: str, preparation: str, run_dir: Path, *options: str) -> list[str]:
    """Command line of a daemon whose region is on a fresh tmpfs that only it sees."""
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root can mount a tmpfs")
    probe = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", str(run_dir)], check=False)
    if probe.returncode != 0:
        pytest.skip("this root may not mount a tmpfs")
    region_dir = run_dir / "tmpfs"
    region_dir.mkdir()
    store = f"{sys.executable} -W error -m triptych_cache_store --run-dir={run_dir} --region-dir={region_dir}"
    mount = f"mount -t tmpfs -o mode=700,{mount_options} none {region_dir}"
    script = f"{mount} && {{ {preparation}; }} && exec {store} {' '.join(options)}"
    return ["unshare", "-m", "sh", "-c", script]


def test_a_tmpfs_that_is_full(run_dir: Path) -> None:
    filled = f"head -c {24 * MIB} /dev/zero > {run_dir}/tmpfs/filler"
    command = on_tmpfs("size=32m", filled, run_dir, f"--region-bytes={16 * MIB}")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "does not fit into" in ended.stderr


@pytest.mark.parametrize("option", ["--no-large-pages", "--large-pages"])
def test_a_tmpfs_that_fills_up_before_the_region_has_its_memory(run_dir: Path, option: str) -> None:
    layout = RegionLayout.fit(16 * MIB, 64 << 10)
    sparse = run_dir / "region"
    RegionFile.open(sparse, layout, 1000.0).close(unlink=False)
    prepared = f"cp --sparse=always {sparse} {run_dir}/tmpfs/region"
    prepared += f" && head -c {24 * MIB} /dev/zero > {run_dir}/tmpfs/filler"
    command = on_tmpfs("size=32m", prepared, run_dir, f"--region-bytes={16 * MIB}", option)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "the tmpfs has no memory for the region: No space left on device" in ended.stderr


@pytest.mark.parametrize(
    ("huge", "message"), [("always", "region has large pages"), ("never", "no large pages: mount the tmpfs")]
)
def test_large_pages_or_a_log_line_that_there_are_none(run_dir: Path, huge: str, message: str) -> None:
    command = on_tmpfs(
        f"size=64m,huge={huge}", "true", run_dir, f"--region-bytes={32 * MIB}", "--large-pages"
    )
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line)
        if "large pages" in line:
            break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert message in lines[-1]


def test_asking_for_large_pages_changes_nothing_else(make_daemon: Callable[..., StoreProcess]) -> None:
    daemon = make_daemon("--large-pages")
    assert daemon.stats().num_entries == 0
    assert daemon.stop() == 0
    assert "large pages" in daemon.log()


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
