#!/bin/bash
# on_machine.sh KIT TIER [--fake]: set the kit up beside this machine's own PyTorch, and run one tier of tests.
#
#   1  store, transports and both workers, without vLLM's runner; --fake: on a GPU in host memory
#   2  the whole system with vLLM's runner and the demo model, over each transport
#
# Run it from a checkout. A tier ends within nine minutes. Logs and figures go to $OUT, which is ./gpu-results
# if not set. The environment is kept in $KIT_VENV, by default below the temporary directory.
set -u
kit=$(realpath "$1") tier=$2 fake=${3:-}
out=$(realpath "${OUT:-gpu-results}") venv=${KIT_VENV:-${TMPDIR:-/tmp}/triptych-kit}
mkdir -p "$out"

set_up() {
    local site torch_site
    rm -rf "$venv"
    python3 -m venv --without-pip "$venv" || return
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # The machine's Python may itself be of a virtual environment, which --system-site-packages would miss.
    torch_site=$(python3 -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])') || return
    echo "$torch_site" >"$site/machine.pth"
    python3 -m pip --disable-pip-version-check --python "$venv/bin/python" install \
        --quiet --no-index --no-deps "$kit"/wheels/*.whl || return
    python3 -m zipfile -e "$kit/vllm-python.zip" "$site" && touch "$venv/ready"
}

run_tests() { # NAME LIMIT_S ARGUMENTS...: of pytest; its output goes to $OUT/NAME.log, and its end is shown
    local name=$1 limit_s=$2
    shift 2
    # The machine's own plugins and versions of other packages are not those of these tests.
    PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 timeout -k 10 "$limit_s" python -m pytest -p pytest_asyncio.plugin \
        -p pytest_timeout -W default --durations=0 "$@" >"$out/$name.log" 2>&1
    local status=$?
    echo "== $name: exit status $status"
    tail -n 25 "$out/$name.log"
    [ $status -eq 0 ] || failed=1
}

[ -e "$venv/ready" ] || set_up || exit 2
export PATH=$venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1
export CUDA_DEVICE_ORDER=PCI_BUS_ID HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
if [ "$(df -m --output=avail /dev/shm | tail -1)" -lt 4000 ]; then # containers often have 64 MiB
    mount -o remount,size=16g /dev/shm || echo "/dev/shm is small: regions may not fit"
fi
failed=0
case $tier in
1)
    nvidia-smi -q >"$out/nvidia-smi.log" 2>&1
    handover=tests/gpu/handover/
    run_tests handover 260 $handover $fake "--figures=$out/handover.json" --timeout=120
    [ -n "$fake" ] && exit $failed
    run_tests transports 120 tests/gpu --ignore=$handover --ignore=tests/gpu/test_whole_path.py \
        -k "not outlives and not two_engines"
    timeout 90 python benchmarks/gpu_handover.py "--json=$out/rates.json" >"$out/rates.log" 2>&1 || failed=1
    cat "$out/rates.log"
    # Last: it kills a store whose memory is in use, and a fault there would spoil what comes after it.
    run_tests outlives 40 tests/gpu --ignore=$handover -k outlives
    ;;
2)
    TRIPTYCH_TEST_PREFILL_DECODE_ARGS=$(python -m tests.gpu.kit.vllm_python text)
    TRIPTYCH_TEST_ENCODER_ARGS=$(python -m tests.gpu.kit.vllm_python tower)
    export TRIPTYCH_TEST_PREFILL_DECODE_ARGS TRIPTYCH_TEST_ENCODER_ARGS
    export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
    export TRIPTYCH_TEST_KEEP=$out/.kept
    run_tests whole_path 500 tests/gpu/test_whole_path.py
    python -m tests.gpu.kit.figures "$TRIPTYCH_TEST_KEEP" >"$out/whole_path.json"
    tar -C "$TRIPTYCH_TEST_KEEP" -czf "$out/whole_path.tgz" . && rm -r "$TRIPTYCH_TEST_KEEP"
    ;;
*)
    echo "no tier $tier: 1 or 2" >&2
    exit 2
    ;;
esac
exit $failed
