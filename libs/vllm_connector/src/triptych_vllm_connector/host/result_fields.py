"""Which of vLLM's options change an encoder's output, for the digest. Names are fields of `AsyncEngineArgs`.

Two engines whose options differ in one of these never share a tensor. An encoder and a prefill_decode of
one model must agree, so what belongs to one role, to its sizes or to its speed counts for nothing:
`tests/unit/vllm_connector/host/test_namespace.py` lists those fields, and fails for one in neither list.
"""

IDENTITY_FIELDS = frozenset(
    {
        "model",
        "model_weights",  # where object storage has the weights
        "revision",
        "code_revision",
        "hf_config_path",
        "config_format",
        "hf_overrides",
        "trust_remote_code",  # whose code builds the model and its processor
        "model_impl",
        "model_class_overrides",
    }
)
"""Which model it is: its files, its configuration, its code."""

NUMERIC_FIELDS = frozenset(
    {
        "dtype",
        "quantization",
        "quantization_config",
        "load_format",
        "model_loader_extra_config",
        "ignore_patterns",  # which files of weights are left out
        "mm_encoder_attn_backend",
        "mm_encoder_attn_dtype",
        "mm_encoder_fp8_scale_path",  # its content counts
        "enable_tower_connector_lora",
        "default_mm_loras",  # with `enable_tower_connector_lora` only
    }
)
"""How it computes. Parallelism and kernels change the rounding as the kind of hardware does; only the
encoder's attention backend is named here, since its operator named it."""

MEDIA_FIELDS = frozenset(
    {
        "media_io_kwargs",
        "mm_processor_kwargs",  # but `device`: where it runs, which only an encoder may choose
        "mm_device_do_normalize",
        "video_pruning_rate",
        "video_pruning_method",
    }
)
"""What becomes of the media before the encoder sees them."""

RESULT_FIELDS = IDENTITY_FIELDS | NUMERIC_FIELDS | MEDIA_FIELDS

ACCESS_FIELDS = frozenset({"hf_token", "download_dir", "allow_deprecated_quantization"})
"""Needed to read the configuration; they change nothing of it."""

SEED_FIELD = "seed"  # counts where weights are made up (`load_format` "dummy")
