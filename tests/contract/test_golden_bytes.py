"""The bytes of every message on every wire. A change here is a change of the protocol.

If a change is meant: raise the version if old readers cannot take the new bytes, delete the golden
file concerned, run this test once (it writes the missing file and fails), and review the diff.
"""

from pathlib import Path
from typing import get_args

import orjson
import pytest

from triptych_common.protocol import codec, item_record, messages, store, transfers
from triptych_common.protocol.codec import BUS_MESSAGES
from triptych_common.protocol.messages import SCHEMA_VERSION, Message
from triptych_common.protocol.store import STORE_PROTOCOL_VERSION, StoreFrame

GOLDEN = Path(__file__).parent / "golden"
HASH = "0123456789abcdef" * 4
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

_REQUESTER = messages.Requester(request_id="req-1", item_index=0, gateway="gateway-0", prefill_decode="pd-0")
_SPEC = store.TensorSpec(shape=(16, 128), dtype="bfloat16", num_bytes=4096)
_RECORD = item_record.ItemRecord(
    fields=(
        item_record.RecordField(
            name="image_grid_thw",
            batching=item_record.Batching.BATCHED,
            keep_on_cpu=True,
            value=item_record.PackedArray(dtype="int64", shape=(3,), data="eJxjZIAADjQaAADwABI="),
        ),
        item_record.RecordField(name="seconds", batching=item_record.Batching.SHARED, value=(0.5, 1)),
    ),
    updates=(
        item_record.PlaceholderUpdate(
            mode="replace",
            target=(7,),
            tokens=item_record.PackedArray(dtype="int32", shape=(2,), data="eJxjZ2BgYAdiAABcAA8="),
            is_embed=item_record.PackedArray(dtype="bool", shape=(2,), data="eJxjZAAAAAQAAg=="),
        ),
    ),
)
_DESCRIPTOR = store.Descriptor(mm_hash=HASH, spec=_SPEC, offset=65536, generation=2)

BUS_SAMPLES: tuple[Message, ...] = (
    messages.EncodeJob(
        job_id="job-1",
        mm_hash=HASH,
        modality=messages.Modality.IMAGE,
        media_num_bytes=3,
        media_url="http://gateway-0:8000/internal/media/token",
        image=messages.ImageProperties(format="PNG", width=640, height=480),
        mm_processor_kwargs={"max_pixels": 1003520, "größe": 1.5},
        media_io_kwargs={},
        requesters=(_REQUESTER,),
        attempt=2,
        namespace_digest=HASH,
        encode_class=messages.EncodeClass.BATCH,
        flow="0123456789abcdef",
    ),
    messages.EncoderCacheMetadata(
        job_id="job-1",
        mm_hash=HASH,
        modality=messages.Modality.IMAGE,
        num_embeds=16,
        width=128,
        dtype="bfloat16",
        num_bytes=4096,
        record=_RECORD,
        encoder="encoder-0",
        store="store-0",
        sealed=False,
        requesters=(_REQUESTER,),
    ),
    messages.EncodeCompleted(job_id="job-1", mm_hash=HASH, encoder="encoder-0", encode_s=0.125),
    messages.EncodeFailed(
        job_id="job-1",
        mm_hash=HASH,
        encoder="encoder-0",
        kind=messages.FailureKind.BAD_MEDIA,
        detail="cut off",
    ),
    messages.Preallocation(
        request_id="req-1",
        item_index=0,
        job_id="job-1",
        mm_hash=HASH,
        prefill_decode="pd-0",
        decision=messages.Decision.DECLINED,
        reason="prefix_cached",
    ),
    messages.ItemAck(
        request_id="req-1",
        item_index=0,
        job_id="job-1",
        mm_hash=HASH,
        prefill_decode="pd-0",
        outcome=messages.Outcome.INJECTED,
    ),
    messages.EncodeNeeded(
        request_id="req-1", item_index=0, mm_hash=HASH, prefill_decode="pd-0", reason="writer_lost"
    ),
    transfers.TransferOrder(
        transfer_id="transfer-1",
        mm_hash=HASH,
        entries=(HASH,),
        source="store-0",
        target="store-1",
        gateway="gateway-0",
    ),
    transfers.TransferCompleted(
        transfer_id="transfer-1",
        mm_hash=HASH,
        source="store-0",
        target="store-1",
        transport=messages.FabricTransport.TCP,
        num_bytes=4096,
        transfer_s=0.25,
    ),
    transfers.TransferFailed(
        transfer_id="transfer-1",
        mm_hash=HASH,
        source="store-0",
        target="store-1",
        kind=transfers.TransferFailureKind.UNREACHABLE,
        detail="no agent",
    ),
)

COMMAND_SAMPLES: tuple[StoreFrame, ...] = (
    store.Hello(seq=1, version=STORE_PROTOCOL_VERSION, client="encoder-0/worker-0", namespace_digest=HASH),
    store.Ping(seq=2),
    store.Reserve(seq=3, mm_hash=HASH, spec=_SPEC, writer="encoder-0/worker-0", may_use_reserve=True),
    store.Seal(seq=4, reservation_id=7),
    store.Cancel(seq=5, reservation_id=7),
    store.PinOrWatch(seq=6, mm_hash=HASH, num_holders=2),
    store.Unwatch(seq=7, mm_hash=HASH),
    store.Unpin(seq=8, pin_id=9),
    store.Lookup(seq=9, mm_hashes=(HASH,)),
    store.StatsQuery(seq=10),
    store.ListEntries(seq=11),
    store.Evict(seq=12, mm_hash=None),
    store.Verify(seq=13, evict=True),
    store.MetricsQuery(seq=14),
)

REPLY_SAMPLES: tuple[StoreFrame, ...] = (
    store.Welcome(
        seq=1,
        store="store-0",
        generation=2,
        region_path="/run/triptych/region",
        region_num_bytes=1 << 28,
        block_num_bytes=65536,
        slab=store.SlabInfo(
            memory="cuda:GPU-0123abcd-0123-0123-0123-0123456789ab", num_bytes=1 << 30, ipc_handle="ab" * 64
        ),
    ),
    store.Done(seq=2),
    store.Reserved(seq=3, reservation_id=7, offset=65536, generation=2),
    store.AlreadySealed(seq=3, spec=_SPEC),
    store.Pinned(seq=6, pin_id=9, descriptor=_DESCRIPTOR),
    store.Watching(seq=6, mm_hash=HASH, writing=True),
    store.EntrySealed(seq=0, pin_id=9, descriptor=_DESCRIPTOR),
    store.WriterLost(seq=0, mm_hash=HASH),
    store.Entries(
        seq=9, entries=(store.EntryInfo(mm_hash=HASH, state="ready", spec=_SPEC, num_pins=0, age_s=1.5),)
    ),
    store.StoreStats(
        seq=10,
        generation=2,
        region_num_bytes=1 << 28,
        free_num_bytes=1,
        writing_num_bytes=2,
        ready_num_bytes=3,
        pinned_num_bytes=4,
        abandoned_num_bytes=5,
        num_entries=6,
        num_reservations=7,
        num_pins=8,
        num_watches=9,
        num_sessions=10,
        num_seals_total=11,
        num_hits_total=12,
        num_misses_total=13,
        num_evictions_total=14,
        slab_num_bytes=1 << 30,
        slab_free_num_bytes=15,
    ),
    store.Verified(
        seq=13,
        num_intact=1,
        num_recorded=2,
        num_gone=3,
        num_damaged=1,
        num_bytes=4096,
        elapsed_s=0.5,
        damaged=(store.EntryFault(mm_hash=HASH, fault="checksum", num_pins=1),),
    ),
    store.StoreMetrics(seq=14, text="triptych_store_pins 0.0\n"),
    store.StoreFailure(seq=3, code="full", detail="no 4096 bytes free"),
)

RECORD_SAMPLE = messages.InstanceRecord(
    instance="pd-0",
    boot_id="b-1",
    role=messages.Role.PREFILL_DECODE,
    url="http://pd-0:8000",
    model="digits-vl",
    adapters=("digits-french",),
    namespace_digest=HASH,
    dtype="bfloat16",
    item_limits={messages.Modality.IMAGE: 4, messages.Modality.VIDEO: 1},
    placeholder_tokens=("<image>",),
    max_item_embeds=4096,
    max_model_len=8192,
    store="store-0",
    num_slots=8,
    transports=(messages.Transport.CUDA_IPC, messages.Transport.PINNED_SHM),
    device="GPU-0123abcd-0123-0123-0123-0123456789ab",
    slab_generation=2,
    unserved_modalities={messages.Modality.AUDIO: "the model's processor takes too few of our media"},
    slab_failure="cudaIpcOpenMemHandle: invalid device context",
    compute=messages.Compute(
        sharing=messages.Sharing.MPS,
        policy="split",
        cores=(0, 1),
        gpu="MIG-0123abcd",
        num_engines=2,
        num_multiprocessors=66,
        thread_percentage="50",
        priority="0",
    ),
    kv_transfer=messages.KvTransfer(
        connector="NixlConnector", compatibility="0123456789abcdef", lease_s=30.0
    ),
    stores_responses=True,
    kv_cache_tokens=32768,
    load=messages.ServingLoad(num_beats=7, num_running=2, num_waiting=1, kv_usage=0.25),
    model_version="2026-11",
    host="host-a",
    release="0.1.0",
    fabric=messages.FabricEndpoint(host="192.0.2.1", port=7420, generation=3),
    fabric_load=messages.FabricLoad(
        num_entries=2,
        entries_num_bytes=4096,
        free_num_bytes=8192,
        links=(
            messages.FabricLink(
                target="store-b",
                transport=messages.FabricTransport.TCP,
                is_up=True,
                num_in_flight=1,
                num_bytes=1 << 20,
                bytes_per_s=1e8,
                failure="unreachable",
                failed_s=2.5,
            ),
        ),
    ),
)

TRANSFER_SAMPLE = messages.ECTransferParams(
    request_id="req-1",
    gateway="gateway-0",
    traceparent=TRACEPARENT,
    remaining_ms=29000,
    flow="a1b2c3",
    items=(
        messages.ItemTransfer(
            item_index=0, mm_hash=HASH, modality=messages.Modality.IMAGE, num_embeds=16, record=_RECORD
        ),
    ),
)


def _names(samples: tuple[Message, ...]) -> list[str]:
    return [sample.TYPE for sample in samples]


def check_golden(name: str, data: bytes) -> None:
    path = GOLDEN / name
    if not path.exists():
        path.write_bytes(data)
        pytest.fail(f"{path.name} was missing and has been written; review it")
    assert data == path.read_bytes()


def envelope_text(fields: dict[bytes, bytes]) -> bytes:
    return b"".join(name + b"\t" + value + b"\n" for name, value in fields.items())


@pytest.mark.parametrize("message", BUS_SAMPLES, ids=_names(BUS_SAMPLES))
def test_bus_message(message: Message) -> None:
    fields = codec.encode(message, traceparent=TRACEPARENT, remaining_ms=1500, blob=b"PNG")
    check_golden(f"bus_{message.TYPE}_v{SCHEMA_VERSION}.txt", envelope_text(fields))
    envelope = codec.decode(fields)
    assert envelope.message == message
    assert (envelope.traceparent, envelope.remaining_ms, envelope.blob) == (TRACEPARENT, 1500, b"PNG")


@pytest.mark.parametrize("command", COMMAND_SAMPLES, ids=_names(COMMAND_SAMPLES))
def test_store_command(command: StoreFrame) -> None:
    framed = codec.frame(command)
    check_golden(f"command_{command.TYPE}_v{STORE_PROTOCOL_VERSION}.bin", framed)
    (body,) = codec.FrameDecoder().feed(framed)
    assert codec.decode_command(body) == command


@pytest.mark.parametrize("reply", REPLY_SAMPLES, ids=_names(REPLY_SAMPLES))
def test_store_reply(reply: StoreFrame) -> None:
    framed = codec.frame(reply)
    check_golden(f"reply_{reply.TYPE}_v{STORE_PROTOCOL_VERSION}.bin", framed)
    (body,) = codec.FrameDecoder().feed(framed)
    assert codec.decode_reply(body) == reply


def test_instance_record() -> None:
    value = codec.encode_record(RECORD_SAMPLE)
    check_golden(f"registry_InstanceRecord_v{SCHEMA_VERSION}.json", value)
    assert codec.decode_record(value) == RECORD_SAMPLE


def test_transfer_params() -> None:
    value = orjson.dumps(TRANSFER_SAMPLE.model_dump(mode="json"))
    check_golden(f"http_ECTransferParams_v{SCHEMA_VERSION}.json", value)
    assert messages.ECTransferParams.model_validate_json(value, strict=True) == TRANSFER_SAMPLE


def test_every_message_has_a_sample() -> None:
    assert {type(sample) for sample in BUS_SAMPLES} == set(BUS_MESSAGES)
    assert {type(sample) for sample in COMMAND_SAMPLES} == set(get_args(get_args(store.StoreCommand)[0]))
    assert {type(sample) for sample in REPLY_SAMPLES} == set(get_args(get_args(store.StoreReply)[0]))
