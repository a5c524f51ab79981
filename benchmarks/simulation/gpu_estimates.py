"""Stage times of Qwen2.5-VL-7B on an H100: computed from published figures, not measured.

Shapes: Qwen2.5-VL technical report (arXiv 2502.13923), table 1. GPU: NVIDIA's data sheet of the H100
SXM. How much
of the GPU's peak each stage reaches, and the fixed times of a step, are assumptions, named below. What
runs on the CPU (gateway, Redis, store, preprocessing, hops) is taken from a measured set, whose machine is a
slow one.
"""

from dataclasses import dataclass, replace

from simulation.parameters import EngineCosts, StageTimes


@dataclass(frozen=True)
class GpuFigures:
    """Published figures of one GPU."""

    flops: float = 989.4e12  # bfloat16, dense (data sheet: 1,979 with sparsity)
    memory_bytes_per_s: float = 3.35e12  # HBM3
    memory_bytes: float = 80e9
    link_bytes_per_s: float = 50e9  # assumed: of PCIe Gen5 x16's 64 GB/s each way
    encode_share: float = 0.40  # assumed: of `flops`, the tower
    prefill_share: float = 0.50  # assumed: of `flops`
    decode_share: float = 0.70  # assumed: of `memory_bytes_per_s`
    kv_memory_share: float = 0.90  # vLLM's default --gpu-memory-utilization


@dataclass(frozen=True)
class ModelShapes:
    """Shapes of Qwen2.5-VL-7B's layers."""

    tower_layers: int = 32
    tower_width: int = 1280
    tower_inner: int = 3456
    full_attention_layers: int = 4
    window_patches: int = 64  # 112 × 112 pixels of 14 × 14
    patches_per_row: int = 4
    layers: int = 28
    width: int = 3584
    inner: int = 18944
    kv_heads: int = 4
    head_size: int = 128
    vocabulary: int = 152_064

    def tower_flops_per_row(self, rows: int) -> float:
        """FLOPs per row of an image with `rows` rows: weights, windows, full attention, and the merger."""
        patches = rows * self.patches_per_row
        weights = self.tower_layers * (4 * self.tower_width**2 + 3 * self.tower_width * self.tower_inner)
        windows = (
            (self.tower_layers - self.full_attention_layers) * 2 * self.window_patches * self.tower_width
        )
        full = self.full_attention_layers * 2 * patches * self.tower_width
        merged = self.tower_width * self.patches_per_row
        return 2 * (self.patches_per_row * (weights + windows + full) + merged**2 + merged * self.width)

    @property
    def language_parameters(self) -> int:
        """Parameters of the language model's layers, without embeddings."""
        kv_width = self.kv_heads * self.head_size
        return self.layers * (2 * self.width**2 + 2 * self.width * kv_width + 3 * self.width * self.inner)

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_size * 2


NOMINAL_ROWS = 1521  # an image of 1092 × 1092 pixels
ENGINE_OVERHEAD_S = 1e-3  # assumed: scheduling and launching of a step beside the GPU's own time
TOWER_OVERHEAD_S = 4e-3  # assumed: of an encode step
FRONT_S = 5e-3  # assumed: vLLM's API process, each request
HOP_S = 5e-4  # assumed: through Redis; the least that was seen here is 0.4 ms
NUM_PREPROCESS_THREADS = 8  # assumed: CPU cores of the host for each encoder


def estimate(
    cpu: StageTimes, gpu: GpuFigures = GpuFigures(), shapes: ModelShapes = ModelShapes()
) -> StageTimes:
    """`cpu`: a measured set, for everything that does not run on the GPU."""
    weights_bytes = 2 * (shapes.language_parameters + shapes.width * shapes.vocabulary)
    kv_bytes = gpu.memory_bytes * gpu.kv_memory_share - weights_bytes - 5e9  # assumed: activations, tower
    memory_rate = gpu.memory_bytes_per_s * gpu.decode_share
    engine = EngineCosts(
        front_s=FRONT_S, front_token_s=cpu.engine.front_token_s, reply_s=1e-3, wake_s=1e-3,
        step_s=weights_bytes / memory_rate + ENGINE_OVERHEAD_S,
        token_s=2 * shapes.language_parameters / (gpu.flops * gpu.prefill_share),
        sequence_s=1e-5, context_s=shapes.kv_bytes_per_token / memory_rate,
        inject_bytes_per_s=gpu.link_bytes_per_s, max_step_tokens=8192, max_sequences=256,
        kv_tokens=int(kv_bytes / shapes.kv_bytes_per_token), cache_rows=8192,
    )  # fmt: skip
    encoder = replace(
        cpu.encoder, num_threads=NUM_PREPROCESS_THREADS, step_s=TOWER_OVERHEAD_S,
        row_s=shapes.tower_flops_per_row(NOMINAL_ROWS) / (gpu.flops * gpu.encode_share),
        step_rows=8192, write_bytes_per_s=gpu.link_bytes_per_s,
    )  # fmt: skip
    return replace(
        cpu, name="h100-qwen2.5-vl-7b", origin="assumed",
        note="GPU times computed by gpu_estimates.py from published figures; CPU times measured here",
        row_bytes=2 * shapes.width, tokens_per_word=1.0, template_tokens=20.0, client_s=0.0,
        shares_core=False, redis=replace(cpu.redis, hop_s=HOP_S), encoder=encoder, engine=engine,
    )  # fmt: skip
