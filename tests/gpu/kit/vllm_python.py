"""vLLM's Python without its compiled parts, with stand-ins for those that it imports at once.

    python -m tests.gpu.kit.vllm_python text|tower

prints the options of an engine that runs it. With torch and Triton it runs model runner V2, the encoder's
runner, EngineCore and the API server; the options avoid vLLM's own operators, so its speed is not vLLM's.
"""

import json
import re
import shlex
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

_NATIVE = {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}
TEXT_OPTIONS = (
    "--attention-backend=TRITON_ATTN",
    f"--kernel-config={json.dumps({'ir_op_priority': _NATIVE})}",
    f"--compilation-config={json.dumps({'custom_ops': ['none']})}",
)
TOWER_OPTIONS = (*TEXT_OPTIONS, "--mm-encoder-attn-backend=TORCH_SDPA", "--enforce-eager")

CARRIED_SUFFIXES = (".py", ".json", ".jinja", ".yaml")
LEFT_OUT = ("/third_party/deep_gemm/", "/fused_moe/configs/", "/quantization/utils/configs/")
"""Parts that only serve compiled operators, and tables of their tuned parameters."""

OPERATORS = '''"""Stand-in for vLLM's compiled operators: those that are asked at import, and "no" to each."""

import torch

_library = torch.library.Library("_C", "FRAGMENT")
for _name in (
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
):
    _library.define(f"{_name}(int capability) -> bool")
    _library.impl(_name, lambda capability: False, "CompositeExplicitAutograd")
'''
NO_FLASH_ATTENTION = '"""Stand-in for compiled flash attention, which is not here: use TRITON_ATTN."""\n'
STAND_INS = {
    "vllm/_C_stable_libtorch.py": OPERATORS,
    "vllm/vllm_flash_attn/_vllm_fa2_C.py": NO_FLASH_ATTENTION,
    "vllm/vllm_flash_attn/_vllm_fa3_C.py": NO_FLASH_ATTENTION,
}


def write_archive(source: Path, archive: Path) -> None:
    """Write a zip file with vLLM's Python and the stand-ins.

    Args:
        source: a wheel of vLLM, or a folder in which one is installed.
    """
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target:
        for name, content in _files(source):
            if name.endswith(CARRIED_SUFFIXES) and not any(part in name for part in LEFT_OUT):
                target.writestr(name, content)
            elif (version := _version_of(name)) is not None:
                # Under the name of the build for CUDA, whose Python it is: vLLM chooses its platform by it.
                metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
                target.writestr(f"vllm-{version}.dist-info/METADATA", metadata)
        for name, text in STAND_INS.items():
            target.writestr(name, text)


def _files(source: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each file of vLLM's distribution that may be carried."""
    if source.is_file():
        with zipfile.ZipFile(source) as wheel:
            for name in wheel.namelist():
                yield name, wheel.read(name)
        return
    for pattern in ("vllm/**/*", "vllm*.dist-info/METADATA"):
        for path in source.glob(pattern):
            if path.suffix in CARRIED_SUFFIXES or path.name == "METADATA":
                yield str(path.relative_to(source)), path.read_bytes()


def _version_of(name: str) -> str | None:
    """Return the version in the name of a distribution's metadata; None for other files."""
    found = re.fullmatch(r"vllm(?:_cpu)?-([^/+]+)[^/]*\.dist-info/METADATA", name)
    return None if found is None else found[1]


if __name__ == "__main__":
    print(shlex.join({"text": TEXT_OPTIONS, "tower": TOWER_OPTIONS}[sys.argv[1]]))
