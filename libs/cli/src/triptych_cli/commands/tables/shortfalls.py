"""Capabilities that a ready system lacks although they were asked for, one line each."""

from collections.abc import Iterator, Sequence

from triptych_cli.system.preflight import ModelConfig, is_text_only
from triptych_common.domain.transports import CONSUMING_ROLES, PRODUCING_ROLES
from triptych_common.protocol.messages import InstanceRecord, Role, Transport


def shortfalls(records: Sequence[InstanceRecord], config: ModelConfig, transport: str) -> list[str]:
    """One line for each modality, transport and tower that is missing.

    Args:
        config: of the model; empty: not known.
        transport: as TRIPTYCH_TRANSPORT asks for it.
    """
    return [*_media(records), *_transports(records, transport), *_towers(records, config)]


def _media(records: Sequence[InstanceRecord]) -> Iterator[str]:
    for record in records:
        for modality, reason in record.unserved_modalities.items():
            yield f"{record.instance} serves no {modality}: {reason}"


def _transports(records: Sequence[InstanceRecord], asked: str) -> Iterator[str]:
    for record in records:
        if record.role not in (*PRODUCING_ROLES, *CONSUMING_ROLES) or not record.transports:
            continue
        best = record.transports[0].value
        if record.slab_failure:
            yield f"{record.instance} uses {best}, not cuda_ipc: {record.slab_failure}"
        elif asked not in ("auto", best) or (asked == "auto" and best == Transport.REDIS.value):
            why = f"./triptych logs {record.instance} says why"
            yield f"{record.instance} uses {best}, not {'shared memory' if asked == 'auto' else asked}: {why}"


def _towers(records: Sequence[InstanceRecord], config: ModelConfig) -> Iterator[str]:
    for record in records:
        encodes = record.role in PRODUCING_ROLES or record.role is Role.ENCODE_PREFILL_DECODE
        if encodes and not record.item_limits and not is_text_only(config):
            yield f"{record.instance} encodes nothing: it has loaded no tower for this model"
