"""What a system that is ready serves less than was asked for, one line each."""

from collections.abc import Iterator, Sequence

from triptych_cli.system.preflight import ModelConfig, is_text_only
from triptych_common.domain.transports import CONSUMING_ROLES, PRODUCING_ROLES
from triptych_common.protocol.messages import InstanceRecord, Modality, Role, Transport

SIGNS = {
    Modality.IMAGE: ("vision_config", "image_token_id", "image_token_index"),
    Modality.VIDEO: ("video_token_id", "video_token_index"),
    Modality.AUDIO: ("audio_config", "audio_token_id", "audio_token_index"),
}
"""Keys of a model's configuration that stand for a modality; not every model has them."""


def shortfalls(records: Sequence[InstanceRecord], config: ModelConfig, transport: str) -> list[str]:
    """One line for each modality, transport and tower that is missing.

    Args:
        config: of the model; empty: not known.
        transport: as TRIPTYCH_TRANSPORT asks for it.
    """
    return [*_media(records, config), *_transports(records, transport), *_towers(records, config)]


def modalities_of(config: ModelConfig) -> frozenset[Modality]:
    """Which media the model was made for, as far as its configuration says."""
    keys = set(_keys(config))
    return frozenset(modality for modality, signs in SIGNS.items() if keys.intersection(signs))


def _keys(config: ModelConfig) -> Iterator[str]:
    for key, value in config.items():
        if value is not None:
            yield key
        if isinstance(value, dict):
            yield from _keys(value)


def _media(records: Sequence[InstanceRecord], config: ModelConfig) -> Iterator[str]:
    encoding = [each for each in records if each.role is Role.ENCODE or each.item_limits]
    for modality in sorted(modalities_of(config) if encoding else ()):
        if not any(modality in each.item_limits for each in encoding):
            yield (
                f"{modality.value} is not served: the model takes it, and no instance announces it "
                f"(./triptych logs {encoding[0].instance} says why, if --limit-mm-per-prompt does not)"
            )


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
