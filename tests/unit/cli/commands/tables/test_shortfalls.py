"""What a ready system serves less than was asked for: one line each, and none where all is there."""

from typing import Any

import pytest

from triptych_cli.commands.status_tables import shortfalls
from triptych_common.protocol.messages import InstanceRecord, Modality, Role, Transport

CONFIG = {"vision_config": {"depth": 1}, "video_token_id": 5, "text_config": {"hidden_size": 8}}
BOTH = {Modality.IMAGE: 9, Modality.VIDEO: 9}
SHM, REDIS, IPC = (Transport.PINNED_SHM,), (Transport.REDIS,), (Transport.CUDA_IPC, Transport.PINNED_SHM)


def record(role: Role = Role.ENCODE, **fields: Any) -> InstanceRecord:
    defaults = {"item_limits": BOTH if role is Role.ENCODE else {}, "transports": SHM}
    return InstanceRecord(instance=f"{role.value}-0", boot_id="b", role=role, **{**defaults, **fields})


@pytest.mark.parametrize(
    ("records", "asked", "line"),
    [
        (
            [record(item_limits={Modality.IMAGE: 9}, unserved_modalities={Modality.VIDEO: "no video fits"})],
            "auto",
            "encode-0 serves no video: no video fits",
        ),
        (
            [record(), record(Role.PREFILL_DECODE, transports=REDIS)],
            "auto",
            "prefill-decode-0 uses redis, not shared",
        ),
        ([record(slab_failure="no rights")], "cuda_ipc", "uses pinned_shm, not cuda_ipc: no rights"),
        ([record()], "cuda_ipc", "encode-0 uses pinned_shm, not cuda_ipc"),
        ([record(), record(Role.ENCODE_PREFILL_DECODE)], "auto", "encode-prefill-decode-0 encodes nothing"),
    ],
)
def test_what_is_missing_is_one_line(records: list[InstanceRecord], asked: str, line: str) -> None:
    (found,) = shortfalls(records, CONFIG, asked)
    assert line in found


@pytest.mark.parametrize(
    ("records", "asked"),
    [
        ([record(), record(Role.PREFILL_DECODE), record(Role.DECODE, transports=())], "auto"),
        ([record(transports=REDIS)], "redis"),
        ([record(transports=IPC)], "auto"),
    ],
)
def test_a_system_that_serves_all_has_no_line(records: list[InstanceRecord], asked: str) -> None:
    assert shortfalls(records, CONFIG, asked) == []
