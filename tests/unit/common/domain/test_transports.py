"""Which memory a pair uses: the best that all can, and never one that an instance cannot read."""

from dataclasses import replace

import pytest

from triptych_common.domain.transports import (
    Pair,
    StoreSlab,
    TransportCapabilities,
    choose_memories,
    choose_pairs,
)
from triptych_common.protocol.messages import InstanceRecord, Role, Transport
from triptych_vllm_connector.config import TransportSetting
from triptych_vllm_connector.host.slab_watch import TransportError, announced_capabilities
from triptych_vllm_connector.slab_probe import NO_GPU, SlabProbeResult

GPU, OTHER_GPU = (f"GPU-00000000-0000-0000-0000-00000000000{n}" for n in "ab")
SLAB = StoreSlab(f"cuda:{GPU}", generation=7)
READ = SlabProbeResult(GPU, generation=7)
ON_GPU = announced_capabilities("auto", slab=READ, has_region=True)
ON_OTHER_GPU = announced_capabilities("auto", slab=SlabProbeResult(OTHER_GPU, generation=7), has_region=True)
READ_THE_ONE_BEFORE = announced_capabilities("auto", slab=SlabProbeResult(GPU, generation=6), has_region=True)
CANNOT_MAP_IT = announced_capabilities(
    "auto", slab=SlabProbeResult(GPU, 7, "cudaIpcOpenMemHandle"), has_region=True
)
ON_CPU = announced_capabilities("auto", slab=NO_GPU, has_region=True)
NO_REGION = announced_capabilities("auto", slab=NO_GPU, has_region=False)
WANTS_REDIS = announced_capabilities("redis", slab=READ, has_region=True)


@pytest.mark.parametrize(
    ("producer", "consumers", "slab", "memories"),
    [
        (ON_GPU, [ON_GPU], SLAB, [SLAB.memory, "shm"]),
        (ON_GPU, [], SLAB, [SLAB.memory, "shm"]),
        (ON_GPU, [ON_GPU], None, ["shm"]),
        (ON_GPU, [ON_GPU, ON_OTHER_GPU], SLAB, ["shm"]),
        (ON_OTHER_GPU, [ON_GPU], SLAB, ["shm"]),
        (ON_GPU, [ON_GPU, CANNOT_MAP_IT], SLAB, ["shm"]),
        (CANNOT_MAP_IT, [ON_GPU], SLAB, ["shm"]),
        (ON_GPU, [READ_THE_ONE_BEFORE], SLAB, ["shm"]),
        (READ_THE_ONE_BEFORE, [ON_GPU], SLAB, ["shm"]),
        (ON_GPU, [ON_GPU], StoreSlab(SLAB.memory, generation=8), ["shm"]),
        (ON_GPU, [ON_GPU, ON_CPU], SLAB, ["shm"]),
        (ON_CPU, [ON_CPU], None, ["shm"]),
        (ON_CPU, [NO_REGION], None, ["redis"]),
        (NO_REGION, [ON_CPU], None, ["redis"]),
        (ON_GPU, [WANTS_REDIS], SLAB, ["redis"]),
        (WANTS_REDIS, [ON_GPU], SLAB, ["redis"]),
        (announced_capabilities("pinned_shm", slab=READ, has_region=True), [ON_GPU], SLAB, ["shm"]),
        (announced_capabilities("pinned_shm", slab=READ, has_region=True), [WANTS_REDIS], SLAB, ["shm"]),
        (announced_capabilities("cuda_ipc", slab=READ, has_region=True), [ON_GPU], SLAB, [SLAB.memory]),
        (announced_capabilities("cuda_ipc", slab=READ, has_region=True), [ON_GPU], None, ["shm"]),
    ],
)
def test_the_best_that_all_can(
    producer: TransportCapabilities,
    consumers: list[TransportCapabilities],
    slab: StoreSlab | None,
    memories: list[str],
) -> None:
    assert choose_memories(producer, consumers, slab) == memories


@pytest.mark.parametrize(("setting", "has_region"), [("cuda_ipc", True), ("pinned_shm", False)])
def test_what_is_asked_for_and_not_there_is_an_error(setting: TransportSetting, has_region: bool) -> None:
    with pytest.raises(TransportError, match=setting):
        announced_capabilities(setting, slab=NO_GPU, has_region=has_region)


def test_why_the_slab_cannot_be_used_is_shown_with_its_pairs() -> None:
    records = [
        record("encoder-0", Role.ENCODE, ON_GPU),
        record("pd-0", Role.PREFILL_DECODE, ON_GPU),
        record("pd-1", Role.PREFILL_DECODE, CANNOT_MAP_IT, failure="cudaIpcOpenMemHandle"),
    ]
    assert choose_pairs(records, SLAB) == [
        Pair("encoder-0", "pd-0", Transport.PINNED_SHM),
        Pair("encoder-0", "pd-1", Transport.PINNED_SHM, "cudaIpcOpenMemHandle"),
    ]


def test_what_a_worker_found_is_why_it_refuses() -> None:
    with pytest.raises(TransportError, match="invalid device context"):
        announced_capabilities(
            "cuda_ipc", slab=SlabProbeResult(GPU, 7, "invalid device context"), has_region=True
        )


def test_an_instance_that_announces_nothing_reads_the_region() -> None:
    record = InstanceRecord(instance="pd-0", boot_id="b", role=Role.PREFILL_DECODE)
    assert TransportCapabilities.announced(record).transports == (Transport.PINNED_SHM,)


def record(
    instance: str,
    role: Role,
    offer: TransportCapabilities,
    namespace: str = "d" * 64,
    failure: str | None = None,
) -> InstanceRecord:
    return InstanceRecord(
        instance=instance,
        boot_id="b",
        role=role,
        namespace_digest=namespace,
        transports=offer.transports,
        device=offer.device,
        slab_generation=offer.slab_generation,
        slab_failure=failure,
    )


def test_every_pair_of_a_namespace_with_the_producers_choice() -> None:
    records = [
        record("encoder-0", Role.ENCODE, ON_GPU),
        record("encoder-1", Role.ENCODE, ON_OTHER_GPU),
        record("encoder-2", Role.ENCODE, ON_CPU, "e" * 64),
        record("pd-0", Role.PREFILL_DECODE, ON_GPU),
        record("pd-1", Role.PREFILL_DECODE, WANTS_REDIS, "e" * 64),
        record("gateway-0", Role.GATEWAY, ON_CPU),
    ]
    assert choose_pairs(records, SLAB) == [
        Pair("encoder-0", "pd-0", Transport.CUDA_IPC),
        Pair("encoder-1", "pd-0", Transport.PINNED_SHM),
        Pair("encoder-2", "pd-1", Transport.REDIS),
    ]
    assert choose_pairs(records[:1], SLAB) == []


def of_store(store: str) -> TransportCapabilities:
    return replace(ON_GPU, store=store)


@pytest.mark.parametrize(
    ("consumers", "memories"),
    [
        ([of_store("store-a")], [SLAB.memory, "shm"]),
        ([of_store("store-b")], ["shm"]),
        ([of_store("store-a"), of_store("store-b")], ["shm"]),
        ([ON_GPU], [SLAB.memory, "shm"]),  # it does not say
        ([replace(WANTS_REDIS, store="store-b")], ["redis"]),
    ],
)
def test_where_a_consumer_has_another_store_no_slab_is_chosen(
    consumers: list[TransportCapabilities], memories: list[str]
) -> None:
    assert choose_memories(of_store("store-a"), consumers, SLAB) == memories


def test_a_producer_of_the_slab_alone_uses_the_region_for_another_store() -> None:
    only_slab = replace(of_store("store-a"), transports=(Transport.CUDA_IPC,))
    assert choose_memories(only_slab, [of_store("store-a")], SLAB) == [SLAB.memory]
    assert choose_memories(only_slab, [of_store("store-b")], SLAB) == ["shm"]


def test_pairs_say_that_an_instance_has_another_store() -> None:
    records = [
        record("encoder-0", Role.ENCODE, ON_GPU).model_copy(update={"store": "store-a"}),
        record("pd-0", Role.PREFILL_DECODE, ON_GPU).model_copy(update={"store": "store-a"}),
        record("pd-1", Role.PREFILL_DECODE, ON_GPU).model_copy(update={"store": "store-b"}),
    ]
    assert choose_pairs(records, SLAB) == [
        Pair("encoder-0", "pd-0", Transport.PINNED_SHM, "pd-1 has another store"),
        Pair("encoder-0", "pd-1", Transport.PINNED_SHM, "pd-1 has another store"),
    ]
    assert choose_pairs(records[:2], SLAB) == [Pair("encoder-0", "pd-0", Transport.CUDA_IPC)]
