"""Shared memory and the store's client: what a process needs to read and write tensors in the region.

layout       where things are in the region file, and its headers (pure, on any buffer)
mapping      one process's mapping of the region
streaming    large copies into it, around the caches
tensor_view  torch tensors on a mapping (imports torch)
transport    the workers' interface to all transports, and shared memory (imports torch)
cuda         GPUs: memory of the store there, fast copies
session      requests, replies and pushes of one session, matched (pure)
threaded     StoreSession: for inside vLLM, one reader thread
aio          AsyncStoreSession: the same for asyncio services
"""

from triptych_common.region.aio import AsyncStoreSession
from triptych_common.region.mapping import RegionMapping
from triptych_common.region.session import Push
from triptych_common.region.threaded import StoreSession

__all__ = ["AsyncStoreSession", "Push", "RegionMapping", "StoreSession"]
