"""What vLLM's scheduler calls, in EngineCore.

encoder_cache_manager  Encoder cache managers, put into vLLM by `--ec-manager-config`.
failed_loads           Tensors that a worker could not have, as its step's output tells the scheduler; what is
parking_scheduler      Schedulers that park: a request that waits for its tensors costs no engine step.
"""
