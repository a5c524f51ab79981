"""Shared memory: what a process needs to read and write tensors in the region.

layout       where things are in the region file; `records`: the formats of its headers (pure, on any buffer)
mapping      one process's mapping of the region; `pages`: large pages for it
fence        checks a descriptor or reservation against the region's header before every use
slot_lock    a kernel lock per client slot, which proves a client alive
streaming    large copies into it with non-temporal stores, around the CPU's caches
tensor_view  torch tensors on a mapping (imports torch)
transport    the workers' interface to all transports, and the one over shared memory (imports torch)
cuda         GPUs: memory of the store there, fast copies
"""

from triptych_common.region.mapping import RegionMapping

__all__ = ["RegionMapping"]
