"""The namespace digest: equal for every spelling of equal options, different for what changes an output.

vLLM's own parser and `ModelConfig` read a real model's configuration; its weights are made up.
"""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import orjson
import pytest
from vllm.config import LoadConfig, ModelConfig, MultiModalConfig
from vllm.config.lora import LoRAConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.host import namespace as snapshot
from triptych_vllm_connector.host.engine_options import encoder_options, prefill_decode_options
from triptych_vllm_connector.host.namespace import (
    ACCESS_FIELDS,
    RESULT_FIELDS,
    SEED_FIELD,
    EngineOptionsError,
    UnresolvedModelError,
    digest_of_engine,
    digest_of_model,
    parse_engine_options,
    snapshot_parts,
)

# Modules of torch and transformers that vLLM imports late warn of their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

DIGITS = Path(__file__).resolve().parents[4] / "models" / "digits-vl"
COMMIT, OTHER_COMMIT = "1" * 40, "2" * 40
HUB_NAME = "triptych-tests/digits-vl"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder, small enough to be digested whole."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "processor_config.json", "tokenizer_config.json"):
        shutil.copyfile(DIGITS / name, folder / name)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "README.md").write_text("hello")
    return folder


def digest(model: Path | str, *options: str) -> str:
    return digest_of_model(str(model), options)


# ---- spellings -----------------------------------------------------------------------------------
SPELLINGS: dict[str, list[list[str]]] = {
    "mm_processor_kwargs": [
        ["--mm-processor-kwargs", '{"max_pixels": 50176}'],
        ['--mm-processor-kwargs={"max_pixels":50176}'],
        ['--mm_processor_kwargs={"max_pixels": 50176}'],
        ["--mm-processor-kwargs.max_pixels=50176"],
        ["--mm-processor-kwargs.max_pixels", "50176"],
        ["--mm_processor_kwargs.max_pixels=50176"],
        ['--mm-processor-kwargs={"max_pixels": 1}', '--mm-processor-kwargs={"max_pixels": 50176}'],
    ],
    "hf_overrides": [
        ["--hf-overrides", '{"vision_config": {"depth": 2}}'],
        ['--hf_overrides={"vision_config": {"depth": 2}}'],
        ["--hf-overrides.vision_config.depth=2"],
        ["--hf-overrides.vision_config.depth", "2"],
    ],
    "quantization": [["-q", "fp8"], ["-qfp8"], ["--quantization", "fp8"], ["--quantization=fp8"]],
    "dtype": [["--dtype", "float32"], ["--dtype=float32"], ["--dtype=float"]],
    "media_io_kwargs": [
        ["--media-io-kwargs", '{"image": {"rgba_background_color": [0, 0, 0]}}'],
        ['--media_io_kwargs={"image":{"rgba_background_color":[0,0,0]}}'],
        ['--media-io-kwargs.image={"rgba_background_color": [0, 0, 0]}'],
    ],
    "load_format": [["--load-format", "dummy"], ["--load_format=dummy"], ["--load-format=DUMMY"]],
}


@pytest.mark.parametrize("field", SPELLINGS)
def test_every_spelling_has_the_same_digest_and_not_the_plain_one(model: Path, field: str) -> None:
    digests = {" ".join(options): digest(model, *options) for options in SPELLINGS[field]}
    assert len(set(digests.values())) == 1, digests
    assert digest(model) not in digests.values(), digests


def test_a_file_of_options_is_read(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("dtype: float32\nmm-processor-kwargs:\n  max_pixels: 50176\n")
    written_out = digest(model, "--dtype=float32", "--mm-processor-kwargs.max_pixels=50176")
    assert digest(model, "--config", str(file)) == written_out
    assert digest(model, "--config", str(file), "--dtype=bfloat16") == digest(
        model, "--mm-processor-kwargs.max_pixels=50176"
    )  # the command line wins, as in vLLM


def test_what_is_so_anyway_changes_nothing(model: Path) -> None:
    assert digest(model, "--dtype=bfloat16") == digest(model)  # as config.json says
    assert digest(model, "--mm-processor-kwargs={}") == digest(model)


# ---- what counts ---------------------------------------------------------------------------------
COUNTING: list[list[str]] = [
    ["--dtype=float32"],
    ["--dtype=float16"],
    ["-q", "fp8"],
    ["--hf-overrides.vision_config.depth=2"],
    ['--hf-overrides={"image_token_id": 6}'],
    ["--mm-processor-kwargs.max_pixels=50176"],
    ["--mm-processor-kwargs.min_pixels=50176"],
    ["--media-io-kwargs", '{"image": {"image_mode": "RGBA"}}'],
    ["--no-mm-device-do-normalize"],
    ["--load-format=dummy"],
    ["--load-format=dummy", "--seed=7"],
    ["--model-loader-extra-config", '{"num_threads": 3}'],
    ["--ignore-patterns", "*.bin"],
    ["--model-impl=transformers"],
    ["--trust-remote-code"],
    ["--code-revision=" + COMMIT],
    ["--mm-encoder-attn-backend=TORCH_SDPA"],
    ["--mm-encoder-attn-dtype=fp8"],
    ["--video-pruning-rate=0.5"],
    ["--enable-lora", "--enable-tower-connector-lora"],
    ["--enable-lora", "--enable-tower-connector-lora", "--default-mm-loras", '{"image": "/lora"}'],
]


def test_each_option_that_changes_an_output_changes_the_digest(model: Path) -> None:
    digests = {"": digest(model), **{" ".join(options): digest(model, *options) for options in COUNTING}}
    twins = [(a, b) for a in digests for b in digests if a < b and digests[a] == digests[b]]
    assert not twins


def test_the_scales_of_fp8_count_by_content(model: Path, tmp_path: Path) -> None:
    scales, copy = tmp_path / "scales.json", tmp_path / "copy.json"
    for path in (scales, copy):
        path.write_text('{"0": [1, 1, 1]}')
    options = ("--mm-encoder-attn-dtype=fp8", "--mm-encoder-fp8-scale-path")
    before = digest(model, *options, str(scales))
    assert digest(model, *options, str(copy)) == before
    scales.write_text('{"0": [2, 1, 1]}')
    assert digest(model, *options, str(scales)) != before
    with pytest.raises(EngineOptionsError, match="not found"):
        digest(model, *options, str(tmp_path / "missing.json"))


OF_ONE_ROLE: list[list[str]] = [
    ["--max-model-len=512"],
    ["--max-num-seqs=3"],
    ["--max-num-batched-tokens=4096"],
    ["--gpu-memory-utilization=0.5"],
    ["--seed=7"],
    ["--limit-mm-per-prompt", '{"image": 0, "video": 0}'],
    ["--mm-encoder-only"],
    ["--enable-mm-embeds"],
    ["--mm-processor-cache-gb=0"],
    ["--mm-processor-device=cpu"],
    ["--mm-processor-kwargs.device=cuda"],
    ["--enforce-eager"],
    ["--disable-sliding-window"],
    ["--tensor-parallel-size=2"],
    ["--mm-encoder-tp-mode=data"],
    ["--enable-lora", "--max-lora-rank=8"],
    ["--no-enable-prefix-caching"],
    ["--served-model-name=another"],
    ["--chat-template-content-format=string"],
    ["--kv-cache-dtype=fp8"],
    ["--port=1234"],
]


@pytest.mark.parametrize("options", OF_ONE_ROLE, ids=" ".join)
def test_what_belongs_to_one_role_does_not_count(model: Path, options: list[str]) -> None:
    assert digest(model, *options) == digest(model)


@pytest.mark.parametrize("has_encoder", [False, True])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_roles_agree_in_every_field_that_counts(model: Path, has_encoder: bool, on_gpu: bool) -> None:
    """What a role's own options add is none of the fields that the digest is made of."""
    config = ConnectorConfig(
        instance="one",
        deployment="d",
        redis_url="redis://localhost",
        store_socket=Path("/run/store.sock"),
        namespace_digest="0" * 64,
        has_encoder=has_encoder,
    )
    passed = ["--dtype=float32", "--mm-processor-kwargs.max_pixels=50176"]
    plain = parse_engine_options([f"--model={model}", *passed])
    roles = {
        "encoder": encoder_options(config, str(model), 4, on_gpu, passed),
        "prefill_decode": prefill_decode_options(config, str(model), on_gpu, passed),
    }
    for role, options in roles.items():
        parsed = parse_engine_options(options)
        different = {
            name for name in RESULT_FIELDS | {SEED_FIELD} if getattr(parsed, name) != getattr(plain, name)
        }
        assert not different, role


# Fields of vLLM's configuration that change no encoder's output: of one role, of the prompt, of sizes, speed.
NOT_COUNTED = {
    ModelConfig: """
        runner convert tokenizer tokenizer_mode seed allowed_local_media_path allowed_media_domains
        tokenizer_revision max_model_len spec_target_max_model_len enforce_eager return_sampling_mask
        max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay disable_sliding_window
        disable_cascade_attn skip_tokenizer_init enable_prompt_embeds served_model_name generation_config
        override_generation_config enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend
        sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator logits_processors
        io_processor_plugin renderer_num_workers pooler_config
    """,
    MultiModalConfig: """
        language_model_only limit_per_prompt enable_mm_embeds mm_processor_cache_gb mm_processor_cache_type
        mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode
        mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin interleave_mm_strings
        skip_mm_profiling mm_tensor_ipc mm_ipc_gpu_memory_gb
    """,
    LoadConfig: """
        safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size device
        use_tqdm_on_load pt_load_map_location
    """,
    LoRAConfig: """
        max_lora_rank max_loras fully_sharded_loras max_cpu_loras lora_dtype target_modules
        specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels
    """,
}
# Not an option: vLLM derives it from the others.
DERIVED = {
    "hf_config", "hf_text_config", "is_submodel_config", "word_embeddings_untied_by_checkpoint",
    "multimodal_config", "allow_missing_mm_embeddings",
}  # fmt: skip


@pytest.mark.parametrize("config", NOT_COUNTED, ids=lambda config: config.__name__)
def test_every_field_of_vllms_configuration_is_decided_upon(config: type) -> None:
    names = {field.name for field in dataclasses.fields(config)} - DERIVED
    counted, not_counted = RESULT_FIELDS | ACCESS_FIELDS, set(NOT_COUNTED[config].split())
    assert names - counted - not_counted == set(), "neither counted nor not"
    assert not_counted & counted == set(), "both"
    assert not_counted - names == set(), "unknown to vLLM"


def test_every_counted_field_is_an_option_of_vllm() -> None:
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert RESULT_FIELDS | ACCESS_FIELDS | {SEED_FIELD} <= known


# ---- the model's files ---------------------------------------------------------------------------
def test_the_digest_is_the_same_for_a_copy_elsewhere(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    assert digest(copy) == digest(model)
    assert len(digest(model)) == 64


@pytest.mark.parametrize("name", ["processor_config.json", "model.safetensors", "extra.bin"])
def test_the_digest_changes_with_each_file_that_counts(model: Path, name: str) -> None:
    before = digest(model)
    with (model / name).open("ab") as file:
        file.write(b" ")
    assert digest(model) != before


def test_the_digest_changes_with_the_models_configuration(model: Path) -> None:
    before = digest(model)
    config = orjson.loads((model / "config.json").read_bytes())
    config["vision_config"]["depth"] -= 1
    (model / "config.json").write_bytes(orjson.dumps(config))
    assert digest(model) != before


def test_the_digest_does_not_change_with_other_files(model: Path) -> None:
    before = digest(model)
    (model / "README.md").write_text("good bye")
    (model / "train.py").write_text("pass")
    assert digest(model) == before


def test_code_of_the_model_counts_where_it_is_run(model: Path) -> None:
    (model / "modeling.py").write_text("x = 1")
    before = digest(model, "--trust-remote-code")
    (model / "modeling.py").write_text("x = 2")
    assert digest(model, "--trust-remote-code") != before


def test_large_files_are_sampled_over_their_whole_length(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "_WHOLE_FILE_BYTES", 1000)
    monkeypatch.setattr(snapshot, "_SAMPLE_BYTES", 10)
    path, weights = model / "model.safetensors", bytearray(5000)
    path.write_bytes(weights)
    before = snapshot.file_digest(path)
    for position in (0, 4999):
        path.write_bytes(weights[:position] + b"x" + weights[position + 1 :])
        assert snapshot.file_digest(path) != before
    path.write_bytes(weights + b"\0")
    assert snapshot.file_digest(path) != before


# ---- models of the hub ---------------------------------------------------------------------------
@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache with two commits of one model, of equal content; its branch `main` is the first."""
    cache = tmp_path / "hub"
    repo = cache / f"models--{HUB_NAME.replace('/', '--')}"
    for commit in (COMMIT, OTHER_COMMIT):
        shutil.copytree(model, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "refs" / "next").write_text(OTHER_COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    return repo


def test_a_hub_model_is_known_by_its_commit(hub: Path) -> None:
    first = digest(HUB_NAME)
    assert digest(HUB_NAME, f"--revision={COMMIT}") == first
    assert digest(HUB_NAME, "--revision=main") == first
    other = digest(HUB_NAME, "--revision=next")
    assert other != first
    assert digest(HUB_NAME, "--revision", OTHER_COMMIT) == other
    (hub / "refs" / "main").write_text(OTHER_COMMIT)  # the branch moves: other weights under the same name
    assert digest(HUB_NAME) == other


def test_a_hub_model_that_is_not_there_is_refused(hub: Path) -> None:
    with pytest.raises((EngineOptionsError, UnresolvedModelError)):
        digest("triptych-tests/none")


def test_a_name_without_a_commit_is_refused() -> None:
    with pytest.raises(UnresolvedModelError, match="--revision"):
        snapshot_parts(HUB_NAME, None, runs_its_code=False)
    assert snapshot_parts(HUB_NAME, COMMIT, runs_its_code=False) == {"model": HUB_NAME, "commit": COMMIT}


# ---- what vLLM refuses ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [["--bogus=1"], ["--dtype=float8000"], ["--config", "/nonexistent.yaml"], ["--hf-overrides={"]],
    ids=" ".join,
)
def test_options_that_vllm_refuses_end_the_start_with_one_error(model: Path, options: Sequence[str]) -> None:
    with pytest.raises(EngineOptionsError):
        digest(model, *options)


# ---- engines that users start --------------------------------------------------------------------
def engine_digest(model: Path, *options: str) -> str:
    """As an engine itself makes it, from what it was started with."""
    args = parse_engine_options([f"--model={model}", *options])
    config: Any = SimpleNamespace(
        model_config=args.create_model_config(), load_config=args.create_load_config(), lora_config=None
    )
    return digest_of_engine(config)


def test_an_engines_role_is_not_in_its_digest(model: Path) -> None:
    limits = '--limit-mm-per-prompt={"image": 0, "video": 0}'
    digests = {
        engine_digest(model, "--mm-encoder-only"),
        engine_digest(model, "--enable-mm-embeds", limits, "--max-model-len=64"),
        engine_digest(model, "--seed=7"),
    }
    assert len(digests) == 1


def test_what_changes_an_engines_outputs_is_in_its_digest(model: Path) -> None:
    digests = {
        engine_digest(model, "--dtype=bfloat16"),
        engine_digest(model, "--dtype=float32"),
        engine_digest(model, "--dtype=float32", '--mm-processor-kwargs={"max_pixels": 50176}'),
    }
    (model / "model.safetensors").write_bytes(b"other weights")
    assert len(digests | {engine_digest(model, "--dtype=float32")}) == 4
