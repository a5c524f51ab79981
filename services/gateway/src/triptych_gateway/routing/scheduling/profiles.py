"""Routing profiles: weights, filters and picker of each stage, and the built-in ones."""

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

from triptych_gateway.routing.scheduling.filters import FilterName
from triptych_gateway.routing.scheduling.pickers import PickerName
from triptych_gateway.routing.scheduling.scorers.table import SCORERS
from triptych_gateway.routing.serving_stage import ServingStage

MAX_WEIGHT = 1000.0

Weight = Annotated[float, Field(ge=0, le=MAX_WEIGHT, allow_inf_nan=False)]


class StageProfile(BaseModel):
    """Profile of one stage's choice."""

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
        """Return this profile with the fields of `other`, and its weights one by one."""
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
