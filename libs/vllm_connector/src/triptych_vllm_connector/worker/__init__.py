"""What runs in vLLM's workers.

containment      An item that raises inside the vision tower costs its own job, not the engine and not its nei
cpu_worker       Worker class for the CPU, given to vLLM by `--worker-cls`.
cuda_transports  A worker's ends on its GPU: one driver, one registered region, one slab mapping per store.
encode_clock     How long a step's encoding took: by the host's clock, or the GPU's where the host only launch
gpu_worker       Worker class for GPUs, given to vLLM by `--worker-cls`.
redis_transport  Transport `redis`: the bytes of a tensor under a key of their own, read into memory of the co
rpc              Methods of our worker classes that hosts call by name (`collective_rpc`).
runner_wrappers  The two model runner wrappers: mixins in front of vLLM's own runner class.
transports       A worker's ends of all transports, by the memory that an order names. Made when first needed.
writing_loading  The worker's two ends of the hand-over: write and seal (encoder), inject and release (prefill
"""
