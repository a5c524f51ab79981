"""The choice of an instance is among those that can, by the scores, and by turns among equals."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tests.support.gateway.routing import NAMESPACE, candidate, record_of, request
from triptych_common.protocol.messages import InstanceRecord, Modality, Role
from triptych_gateway.routing.router import STAGE_ROLES, Router, RoutingPolicy
from triptych_gateway.routing.scheduling.candidates import Candidate, ServingStage
from triptych_gateway.routing.scheduling.profiles import SCORERS, RoutingProfiles, StageProfile

NAMES = "abcdef"
SHARES = st.sampled_from((0.0, 0.25, 0.5, 1.0))
WEIGHTS = st.dictionaries(st.sampled_from(sorted(SCORERS)), st.integers(0, 8).map(float))
RECORDS = st.lists(
    st.builds(
        dict,
        role=st.sampled_from(Role),
        model=st.sampled_from(("m", "n")),
        draining=st.booleans(),
        namespace_digest=st.sampled_from((NAMESPACE, "1" * 64)),
        url=st.sampled_from(("http://x", None)),
        item_limits=st.sampled_from(({}, {Modality.AUDIO: 1})),
    ),
    max_size=len(NAMES),
)


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    names = NAMES[: draw(st.integers(1, len(NAMES)))]
    found = []
    for name in names:
        share = draw(SHARES)
        found.append(
            candidate(
                name,
                num_requests=draw(st.integers(0, 12)),
                num_prompt_bytes=draw(st.integers(0, 10**6)),
                kv_usage=draw(st.none() | SHARES),
                is_suspect=draw(st.booleans()),
                picked_at=draw(st.integers(0, 5)),
                prefix_share=lambda prompt, share=share: share,
            )
        )
    return found


@given(
    records=RECORDS,
    stage=st.sampled_from(ServingStage),
    weights=WEIGHTS,
    picker=st.sampled_from(("best", "weighted_random")),
    excluded=st.sets(st.sampled_from(NAMES)),
    suspects=st.sets(st.sampled_from(NAMES)),
    has_namespace=st.booleans(),
    takes=st.sampled_from((frozenset[Modality](), frozenset({Modality.AUDIO}))),
)
def test_the_choice_is_among_those_that_can(
    records: Sequence[dict[str, object]],
    stage: ServingStage,
    weights: dict[str, float],
    picker: str,
    excluded: set[str],
    suspects: set[str],
    has_namespace: bool,
    takes: frozenset[Modality],
) -> None:
    known = [record_of(name, **fields) for name, fields in zip(NAMES, records, strict=False)]
    default = StageProfile.model_validate({"weights": weights, "picker": picker})
    router = Router(2.0, RoutingProfiles(default=default))
    for name in suspects:
        router.avoid_instance(name, now=0.0)
    chosen = router.pick_instance(
        known,
        model="m",
        namespace_digest=NAMESPACE if has_namespace else None,
        exclude=excluded,
        now=1.0,
        takes=takes,
        stage=stage,
        routing=request(b"text" * 99),
    )

    def can(record: InstanceRecord) -> bool:
        return (
            record.role in STAGE_ROLES[stage]
            and record.model == "m"
            and not record.draining
            and record.url is not None
            and (not has_namespace or record.namespace_digest == NAMESPACE)
            and record.instance not in excluded
            and takes <= record.item_limits.keys()
        )

    able = {record.instance for record in known if can(record)}
    assert (chosen is not None) == bool(able)
    if chosen is not None:
        assert chosen.instance in (able - suspects or able)


@given(st.integers(1, len(NAMES)), WEIGHTS, st.integers(2, 5))
def test_nobody_starves_under_equal_scores(number: int, weights: dict[str, float], num_rounds: int) -> None:
    records = [record_of(name) for name in NAMES[:number]]
    weights.pop("session", None)  # which is there to prefer one
    router = Router(2.0, RoutingProfiles(default=StageProfile(weights=weights)))
    picked = Counter(
        chosen.instance
        for _ in range(number * num_rounds)
        if (
            chosen := router.pick_instance(
                records, model="m", namespace_digest=None, exclude=frozenset(), now=0.0
            )
        )
    )
    assert set(picked.values()) == {num_rounds}, picked


@given(candidates(), WEIGHTS, st.sampled_from((0.5, 2.0, 64.0)))
def test_weights_scale(known: list[Candidate], weights: dict[str, float], factor: float) -> None:
    """Only their proportions count."""
    asked = request(b"text" * 99, session="s")
    one, other = (
        RoutingPolicy.of(
            "whole", StageProfile(weights={name: weight * each for name, weight in weights.items()})
        ).decide(asked, known)
        for each in (1.0, factor)
    )
    assert one.record.instance == other.record.instance
    assert abs(one.chosen.total * factor - other.chosen.total) < 1e-3


@given(candidates(), st.sampled_from(sorted(set(SCORERS) - {"session"})))
def test_a_scorer_alone_decides(known: list[Candidate], name: str) -> None:
    """Of those that no filter leaves out, the best by its score."""
    asked = request(b"text" * 99)
    decision = RoutingPolicy.of("whole", StageProfile(weights={name: 1.0}, filters=())).decide(asked, known)
    scores = dict(zip((each.record.instance for each in known), SCORERS[name](asked, known), strict=True))
    assert scores[decision.record.instance] == max(scores.values())
