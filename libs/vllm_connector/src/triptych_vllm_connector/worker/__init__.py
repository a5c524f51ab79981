"""Code in vLLM's workers, on the thread that runs a step, in the order in which a step passes it.

cpu_worker, gpu_worker  worker classes, given to vLLM by `--worker-cls`
rpc                     their methods that hosts call by name: widths, the slab's probe, what it computes on
runner_wrappers         in front of vLLM's model runner: when encoding starts; no encode without a tower
kv/                     KV caches of other engines: when transfers go on, and until when reads count
ports                   the connector's interface, as these call it
step_check              encoder: whether the rows of a video's step depend on its other steps
containment             encoder: an item that raises inside the vision tower costs its own job alone
encoder_memory          encoder: whether its largest steps fit the GPU's memory
writing                 encoder: an output to its reservation, then the seal
loading                 prefill_decode: sealed tensors into vLLM's encoder cache; their pins end
cores/                  what it computes on: on the CPU how many threads, and on which cores now; or which GPU
store_worker            base class of both ends: the store session, the transports, spans
transports              the ends of all transports, by the memory that an order names; transport `redis`
cuda_transports         transports `pinned_shm` and `cuda_ipc`, on the worker's GPU
"""
