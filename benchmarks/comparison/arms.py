"""Arms of the comparison, as data: how each differs from the others. `systems` starts them.

All arms get the same cores, the same memory for KV blocks, the same rows of encoder cache, and the same
options of vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    MONOLITH = "monolith"  # one vLLM engine on all cores
    SERIAL = "serial"  # vLLM's ECExampleConnector on tmpfs behind `serial_proxy`
    TRIPTYCH = "triptych"  # what `./triptych up` starts


@dataclass(frozen=True)
class Arm:
    name: str
    kind: Kind
    summary: str
    num_encoders: int = 1
    is_pinned: bool = True  # False: Triptych places its engines itself
    env: Mapping[str, str] = field(default_factory=dict)  # settings of Triptych


def _triptych(name: str, summary: str, *, encoders: int = 1, policy: str = "split", **env: str) -> Arm:
    settings = {"TRIPTYCH_CORE_POLICY": policy, **{f"TRIPTYCH_{key}": value for key, value in env.items()}}
    return Arm(name, Kind.TRIPTYCH, summary, encoders, policy == "split", settings)


def _with_tower(name: str, who_encodes: str, decision: str) -> Arm:
    """Arm with a vision tower, as `up --local-encode`, with the given `decision`."""
    return _triptych(
        name,
        f"Triptych, cores follow the load, {who_encodes}",
        policy="text_first",
        LOCAL_ENCODE="fallback",
        ENCODE_DECISION=decision,
    )


ARMS: Mapping[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("monolith", Kind.MONOLITH, "one vLLM engine on all cores"),
        Arm(
            "serial",
            Kind.SERIAL,
            "vLLM's own encoder disaggregation (ECExampleConnector on tmpfs), metadata to prefill_decode "
            "when all images are encoded; engines pinned",
        ),
        _triptych("triptych", "Triptych, engines pinned as the serial arm's"),
        _triptych("no_overlap", "the same, overlap off", OVERLAP="false"),
        _triptych(
            "two_encoders",
            "the same, overlap off, two encoders with a core each, prefill_decode on its own",
            encoders=2,
            OVERLAP="false",
        ),
        _triptych("text_first", "Triptych, cores follow the load, text first", policy="text_first"),
        _triptych("image_first", "Triptych, cores follow the load, images first", policy="image_first"),
        _with_tower("helping", "prefill_decode encodes too where that is faster", "auto"),
        _with_tower("always_remote", "the encoder encodes, prefill_decode where it fails", "remote"),
        _with_tower("always_local", "prefill_decode encodes", "local"),
    )
}
DEFAULT_ARMS = ("monolith", "serial", "triptych", "text_first")
