"""Parts of `gpu_handover`.

measuring  ways in turn, their medians, and how they compare with a plain copy of the same bytes; no GPU
ways       `cuda_ipc` and `pinned_shm` as the workers use them, through a store of its own, and plain copies
"""
