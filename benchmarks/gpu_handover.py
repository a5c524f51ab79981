"""Handover of a tensor from a GPU to another worker: cuda_ipc and pinned_shm beside plain copies.

    python benchmarks/gpu_handover.py [--sizes MIB ...] [--repeats N] [--json FILE]

It needs an NVIDIA GPU, a CUDA build of torch and tests/gpu/requirements.txt; nothing of Triptych installed,
no vLLM and no Redis. Every arrival is compared with what was sent.

    cuda_ipc    one copy on the device, into the store's slab; the consumer reads the slab itself.
                Beside a plain copy on the device.
    pinned_shm  one copy into the region, one out of it. Beside plain copies between the device and pinned
                memory of torch's, which is what PCIe gives here.

All ways in turn, medians of `--repeats`; each part is timed until the GPU is done with it. From 64 MiB on the
seconds are fitted as a + b x bytes, and b alone is judged: the target is 0.9 of the plain copy's rate. The
fixed cost a is reported.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [str(ROOT / part) for part in ("libs/common/src", "services/cache_store/src", "benchmarks")]
sys.path[:0] = [path for path in (str(ROOT), *SOURCES) if path not in sys.path]

from tests.support.cuda.gpu import why_no_gpu  # noqa: E402

MIB = 1 << 20
DEFAULT_SIZES_MIB = (1, 16, 64, 128, 256)
SHARED_MEMORY = Path("/dev/shm")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=list(DEFAULT_SIZES_MIB), metavar="MIB")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if (reason := why_no_gpu()) is not None:
        sys.stderr.write(f"nothing can be measured here: {reason}\n")
        return 2
    return measure_all(options)


def measure_all(options: argparse.Namespace) -> int:
    import torch
    from gpu_rates.measuring import fit_table, fits, measure, report, table
    from gpu_rates.ways import COMPARED, Peer, make_tensor, plain_copies

    from tests.support.stores import StoreProcess
    from triptych_common.region.cuda.loading import load_driver

    run_dir = Path(tempfile.mkdtemp(prefix="triptych-gpu-", dir=SHARED_MEMORY))
    room = int((max(options.sizes) * 2 + 64) * MIB)
    store = StoreProcess(run_dir, f"--slab-bytes={room}", region_bytes=room)
    try:
        torch.zeros(1, device="cuda")
        store.start()
        peer = Peer(store, load_driver())
        try:
            figures = measure(
                peer.ways(), plain_copies(), COMPARED, make_tensor, options.sizes, options.repeats
            )
        finally:
            peer.close()
    finally:
        store.close()
        shutil.rmtree(run_dir)
    machine = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": str(torch.version.cuda),
    }  # fmt: skip
    summary = report(machine, figures)
    sys.stdout.write(f"{machine}\n{table(figures)}\n\n{fit_table(fits(figures))}\n")
    if options.json is not None:
        options.json.write_text(json.dumps(summary, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
