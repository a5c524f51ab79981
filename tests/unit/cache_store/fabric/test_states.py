"""Every illegal step of a push and of a reception is refused."""

from typing import Any, cast

import pytest

from triptych_cache_store.fabric.source import push
from triptych_cache_store.fabric.source.push import EntryPush, PushState
from triptych_cache_store.fabric.target import reception
from triptych_cache_store.fabric.target.reception import Reception, ReceptionState
from triptych_cache_store.fabric.wire.frames import Offer
from triptych_common.domain.errors import IllegalTransitionError
from triptych_common.protocol.messages import EncodeClass
from triptych_common.protocol.store import TensorSpec

NOTHING = cast(Any, None)
SPEC = TensorSpec(shape=(1, 1), dtype="float32", num_bytes=4)


@pytest.mark.parametrize("origin", list(PushState))
@pytest.mark.parametrize("to", list(PushState))
def test_pushes(origin: PushState, to: PushState) -> None:
    each = EntryPush("ab" * 32, "store-b", NOTHING, NOTHING, EncodeClass.BATCH)
    each.state = origin
    if to in push.ALLOWED[origin]:
        each._become(to)
        assert each.state is to
    else:
        with pytest.raises(IllegalTransitionError):
            each._become(to)
        assert each.state is origin


@pytest.mark.parametrize("origin", list(ReceptionState))
@pytest.mark.parametrize("to", list(ReceptionState))
async def test_receptions(origin: ReceptionState, to: ReceptionState) -> None:
    offer = Offer(
        mm_hash="ab" * 32, spec=SPEC, is_sealed=True, encode_class=EncodeClass.BATCH, remaining_ms=1
    )
    each = Reception(1, offer, NOTHING, NOTHING, NOTHING)
    each.state = origin
    if to in reception.ALLOWED[origin]:
        each._become(to)
        assert each.state is to
    else:
        with pytest.raises(IllegalTransitionError):
            each._become(to)
        assert each.state is origin
