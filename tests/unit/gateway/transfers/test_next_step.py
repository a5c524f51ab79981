"""What a transfer that waits does next, after every kind of past."""

from dataclasses import replace

import pytest

from triptych_common.protocol.ids import MmHash
from triptych_gateway.transfers.next_step import StepKind, TransferSource, TransferStep, next_step
from triptych_gateway.transfers.transfer_table import Transfer

MAX = 3
NEAR, S1, S2 = (TransferSource(store, 100, is_sealed=True, is_new=False) for store in ("t", "s-1", "s-2"))
ORDER_1, ORDER_2 = TransferStep(StepKind.ORDER, S1), TransferStep(StepKind.ORDER, S2)
WAIT, HOLD, GIVE_UP = (TransferStep(each) for each in (StepKind.WAIT, StepKind.HOLD, StepKind.GIVE_UP))
NEW_1 = TransferStep(StepKind.ORDER, replace(S1, is_new=True))
LOOK_UP = TransferStep(StepKind.LOOK_UP)
ENCODE_NEAR, ENCODE = TransferStep(StepKind.ENCODE, near="t"), TransferStep(StepKind.ENCODE)


@pytest.mark.parametrize(
    ("sources", "tried", "num_attempts", "num_encodes", "is_encoding", "step"),
    [
        ([], (), 0, 0, False, WAIT),  # its `EncodeNeeded` comes
        ([], (), 0, 0, True, WAIT),
        ([S1, S2], (), 0, 0, False, ORDER_1),
        ([S1], (), 0, 0, True, ORDER_1),  # before its seal
        ([NEAR, S1], (), 0, 0, False, HOLD),
        ([NEAR], (), MAX, 0, False, HOLD),  # it came otherwise, after the last attempt
        ([S1, S2], ("s-1",), 1, 0, False, ORDER_2),
        ([S1, S2], ("s-1",), 1, 0, True, ORDER_2),
        ([S1], ("s-1",), 1, 0, True, WAIT),  # for its seal, or another encoder
        ([S1], ("s-1",), 1, 0, False, ENCODE_NEAR),
        ([], ("s-1",), 1, 0, False, ENCODE_NEAR),
        ([S1, S2], ("s-1", "s-2"), 2, 0, False, ENCODE_NEAR),
        ([S1], ("s-1",), 2, 1, False, ENCODE),
        ([replace(S1, is_new=True)], (), 2, 1, False, NEW_1),  # made again there
        ([S1], (), 2, 0, False, ENCODE_NEAR),  # the last attempt is not for a place of the directory
        ([S1], (), 1, 0, False, ORDER_1),
        ([S1, S2], ("s-1",), MAX, 1, False, GIVE_UP),
        ([], ("s-1",), MAX, 2, True, GIVE_UP),
    ],
)
def test_next_step(
    sources: list[TransferSource],
    tried: tuple[str, ...],
    num_attempts: int,
    num_encodes: int,
    is_encoding: bool,
    step: TransferStep,
) -> None:
    transfer = Transfer(MmHash("a" * 64), "t", num_attempts=num_attempts, num_encodes=num_encodes)
    transfer.tried.update(tried)
    is_encode = step.kind is StepKind.ENCODE
    before = next_step(transfer, sources, is_encoding=is_encoding, max_attempts=MAX)
    assert before == (LOOK_UP if is_encode else step), "nothing is encoded again without another look"
    transfer.is_looked_up = True
    assert next_step(transfer, sources, is_encoding=is_encoding, max_attempts=MAX) == step


def test_what_the_target_misses_is_there_for_an_encoders_word_alone() -> None:
    """Its prefill_decode does not ask a second time."""
    transfer = Transfer(MmHash("a" * 64), "t", num_attempts=1, is_missed=True)
    assert next_step(transfer, [NEAR, S1], is_encoding=False, max_attempts=MAX) == ORDER_1
    assert next_step(transfer, [NEAR], is_encoding=False, max_attempts=MAX) == LOOK_UP
    encoded = replace(NEAR, is_new=True)
    assert next_step(transfer, [encoded, S1], is_encoding=False, max_attempts=MAX) == HOLD
