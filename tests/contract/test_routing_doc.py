"""docs/guide/routing.md names every scorer, filter, picker and stage, with the weights that count."""

from pathlib import Path
from typing import get_args

from triptych_gateway.routing.scheduling.candidates import ServingStage
from triptych_gateway.routing.scheduling.profiles import BUILT_IN, SCORERS, FilterName, PickerName

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guide" / "routing.md").read_text()


def rows_of(heading: str) -> dict[str, list[str]]:
    """Of the table below `heading`: the other cells, by the name in the first one."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in rows}


def test_every_scorer_has_its_row_with_its_built_in_weights() -> None:
    rows = rows_of("Scorers")
    assert list(rows) == list(SCORERS)
    for name, cells in rows.items():
        weights = [BUILT_IN.of_stage(stage).weights.get(name, 0.0) for stage in ServingStage]
        assert cells[:3] == [f"{weight:g}" for weight in weights], name


def test_filters_and_pickers() -> None:
    assert list(rows_of("Filters")) == list(get_args(FilterName))
    assert list(rows_of("Pickers")) == list(get_args(PickerName))
