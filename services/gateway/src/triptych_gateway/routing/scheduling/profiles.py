"""Scorers, filters and pickers, and the routing profiles that combine them for each stage."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from triptych_common.domain.errors import TriptychError
from triptych_common.runtime.yaml_file import YamlFileError, read_yaml_file
from triptych_gateway.errors import first_fault
from triptych_gateway.routing.scheduling.candidates import (
    Candidate,
    Filter,
    Picker,
    RoutingRequest,
    ScoredCandidate,
    Scorer,
    ServingStage,
)

MIN_PREFIX_SHARE = 0.25  # less counts as 0: a beginning of all prompts would bring all to one instance
NUM_REQUESTS = 8  # excess over the least busy candidate at which `queue` is 0
NUM_BYTES = 65_536  # excess over the least busy candidate at which `tokens` is 0; 16,000 tokens


def score_prefix(request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
    """Known share of the prompt, which the instance's prefix cache may have; 1 is all of it."""
    shares = [each.prefix_share(request.prompt) for each in candidates]
    return [share if share >= MIN_PREFIX_SHARE else 0.0 for share in shares]


def score_session(request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
    """Score 1 for the instance that a conversation belongs to, by its caller's name for it; else 0.

    Rendezvous hashing gives all gateways the same instance, and when an instance comes or goes, only its own
    conversations move.
    """
    if not request.session:
        return [0.0] * len(candidates)
    draws = [_draw(request.session, each.record.instance) for each in candidates]
    owner = draws.index(max(draws))
    return [float(index == owner) for index in range(len(candidates))]


def _draw(session: str, instance: str) -> bytes:
    return blake3(f"{session}\0{instance}".encode()).digest()


def score_media(request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
    """Share of the items that an instance was sent before, which its caches may hold; 0 without items."""
    items = set(request.items)
    if not items:
        return [0.0] * len(candidates)
    return [sum(map(each.holds_item, items)) / len(items) for each in candidates]


def score_media_near(request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
    """Share of the items in the instance's store; 0 for all without items, or with one registered store."""
    items = set(request.items)
    if not items or not request.items_at:
        return [0.0] * len(candidates)
    return [
        len(items & request.items_at.get(each.record.store or "", frozenset())) / len(items)
        for each in candidates
    ]


def score_queue(request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
    """Score 1 for the candidate with the fewest requests, of all gateways; less per request beyond it."""
    fewest = min(each.num_requests for each in candidates)
    return [max(0.0, 1 - (each.num_requests - fewest) / NUM_REQUESTS) for each in candidates]


def score_kv(request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
    """Free share of the KV cache, as announced; 1 without an announcement."""
    return [1.0 if each.kv_usage is None else 1.0 - each.kv_usage for each in candidates]


def score_lora(request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
    """Score 1 for recent use of the request's LoRA adapter, and for all if the request names none.

    All candidates have loaded it. vLLM keeps few of those where they compute, and copies another one there
    when it is named.
    """
    return [
        float(request.model == each.record.model or each.used_adapter(request.model)) for each in candidates
    ]


def score_hardware(request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
    """Share of the largest in a mixed fleet, in GPUs' multiprocessors if every candidate announces them."""
    sizes = [_num_multiprocessors(each) for each in candidates]
    if not all(sizes):
        sizes = [each.record.num_slots for each in candidates]
    largest = max(sizes)
    return [size / largest if largest else 1.0 for size in sizes]


def _num_multiprocessors(candidate: Candidate) -> int:
    compute = candidate.record.compute
    return 0 if compute is None else compute.num_multiprocessors or 0


def score_tokens(request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
    """Score 1 for the candidate with the least text in this gateway's requests; less per byte beyond it."""
    least = min(each.num_prompt_bytes for each in candidates)
    return [max(0.0, 1 - (each.num_prompt_bytes - least) / NUM_BYTES) for each in candidates]


SCORERS: Mapping[str, Scorer] = {
    "prefix": score_prefix,
    "session": score_session,
    "media": score_media,
    "media_near": score_media_near,
    "queue": score_queue,
    "kv": score_kv,
    "lora": score_lora,
    "hardware": score_hardware,
    "tokens": score_tokens,
}


FilterName = Literal["suspect", "full"]


def make_filter(name: FilterName, full_above: float) -> Filter:
    """Return a filter of unreachable instances, or of those that announce a full KV cache."""
    if name == "suspect":
        return lambda candidate: not candidate.is_suspect
    return lambda candidate: candidate.kv_usage is None or candidate.kv_usage < full_above


PickerName = Literal["best", "weighted_random"]


_RANDOM = random.Random()


def pick_best(scored: Sequence[ScoredCandidate]) -> ScoredCandidate:
    """Return the highest score, and among equal ones the least recently chosen."""
    return min(scored, key=lambda each: (-each.total, each.candidate.picked_at))


def pick_at_random(scored: Sequence[ScoredCandidate], source: random.Random = _RANDOM) -> ScoredCandidate:
    """Return one by chance, in proportion to the scores; if all are 0, with equal chances."""
    totals = [each.total for each in scored]
    return source.choices(scored, totals if any(totals) else None)[0]


PICKERS: Mapping[PickerName, Picker] = {"best": pick_best, "weighted_random": pick_at_random}


MAX_WEIGHT = 1000.0

Weight = Annotated[float, Field(ge=0, le=MAX_WEIGHT, allow_inf_nan=False)]


class StageProfile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: Mapping[str, Weight] = {}
    filters: tuple[FilterName, ...] = ("suspect", "full")
    picker: PickerName = "best"
    full_above: Annotated[float, Field(gt=0, le=1)] = 0.95

    @field_validator("weights")
    @classmethod
    def _check_names(cls, weights: Mapping[str, float]) -> Mapping[str, float]:
        unknown = sorted(weights.keys() - SCORERS.keys())
        if unknown:
            raise ValueError(f"unknown scorer {unknown[0][:100]}; there are {', '.join(SCORERS)}")
        return weights

    @field_validator("filters")
    @classmethod
    def _check_filters(cls, filters: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(filters)) < len(filters):
            raise ValueError("a filter is listed twice")
        return filters

    def changed_by(self, other: "StageProfile") -> Self:
        said = {name: getattr(other, name) for name in other.model_fields_set}
        if "weights" in said:
            said["weights"] = {**self.weights, **said["weights"]}
        return self.model_copy(update=said)


class RoutingProfiles(BaseModel):
    """Profiles of a file. A stage takes missing fields from `default`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    default: StageProfile
    whole: StageProfile = StageProfile()
    prefill: StageProfile = StageProfile()
    decode: StageProfile = StageProfile()

    def of_stage(self, stage: ServingStage) -> StageProfile:
        own: StageProfile = getattr(self, stage.value)
        return self.default.changed_by(own)


BUILT_IN = RoutingProfiles(
    default=StageProfile(
        weights={
            "prefix": 2.0,
            "session": 1.0,
            "media": 1.0,
            "media_near": 2.0,
            "queue": 3.0,
            "kv": 1.0,
            "lora": 1.0,
        }
    ),
    prefill=StageProfile(weights={"kv": 0.0, "tokens": 2.0}),
    decode=StageProfile(weights={"prefix": 0.5, "media": 0.0, "media_near": 0.0, "kv": 3.0}),
)

MAX_FILE_BYTES = 1 << 16
STAGES = tuple(name for name in RoutingProfiles.model_fields if name != "default")


class RoutingFileError(TriptychError):
    """The file of routing profiles cannot be used as it is."""


def read_profiles(path: Path | None) -> RoutingProfiles:
    """Return the profiles of the file (YAML; `docs/guide/routing.md`), or the built-in ones.

        default:                       # what no stage says otherwise
          weights: {prefix: 2, queue: 3}
          filters: [suspect, full]
          full_above: 0.95
          picker: best
        prefill:
          weights: {tokens: 2}

    A file without `default` changes the built-in profiles; one with it replaces them.

    Raises:
        RoutingFileError: it is missing or malformed, or has an unknown field or value.
    """
    if path is None:
        return BUILT_IN
    try:
        content = read_yaml_file(path, f"the routing file {path}", max_bytes=MAX_FILE_BYTES)
    except YamlFileError as error:
        raise RoutingFileError(str(error)) from None
    if not isinstance(content, dict):
        raise RoutingFileError(f"the routing file {path} must hold default, {', '.join(STAGES)}, or some")
    try:
        said = RoutingProfiles.model_validate({"default": {}, **content})
    except ValidationError as error:
        raise RoutingFileError(f"the routing file {path}: {first_fault(error)}"[:1000]) from None
    return said if "default" in content else _changed(said)


def _changed(said: RoutingProfiles) -> RoutingProfiles:
    changes: dict[str, StageProfile] = {
        stage: getattr(BUILT_IN, stage).changed_by(getattr(said, stage)) for stage in STAGES
    }
    return BUILT_IN.model_copy(update=changes)
