"""Entries that the tests of a real cache_store write into it."""

import torch

from triptych_common.protocol.store import Done, Reserve, Reserved, Seal, TensorSpec
from triptych_common.region import RegionMapping
from triptych_common.region.tensor_view import tensor_spec, write_tensor
from triptych_common.store_session import StoreSession

SPEC = TensorSpec(shape=(4, 4), dtype="float32", num_bytes=64)


def mapping_of(session: StoreSession) -> RegionMapping:
    return RegionMapping.open(session.welcome.region_path, session.welcome.region_num_bytes)


def put(session: StoreSession, mm_hash: str, tensor: torch.Tensor) -> None:
    """Reserve, write and seal, as an encoder does."""
    reserved = session.request(Reserve(seq=0, mm_hash=mm_hash, spec=tensor_spec(tensor)))
    assert isinstance(reserved, Reserved)
    write_tensor(mapping_of(session), reserved.offset, tensor)
    assert isinstance(session.request(Seal(seq=0, reservation_id=reserved.reservation_id)), Done)
