"""Divides a prepared video into several items of vLLM, each with some steps of its grid; not for towers that
mix steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from triptych_common.domain.transient import is_transient
from triptych_common.protocol.messages import Modality
from triptych_common.telemetry.logs import get_logger
from triptych_encoder.encoding import PreparedItem, PreprocessFailedError
from triptych_vllm_connector.pieces import divide_position, piece_hashes
from triptych_vllm_connector.records.positions import PositionCheck
from triptych_vllm_connector.records.video_steps import NotInStepsError, cut_steps, num_steps, steps_of_pieces

log = get_logger(__name__)


@dataclass(frozen=True)
class VideoPieces:
    """Divides videos of one model; `positions` checks that the encoder's engine can place each piece."""

    positions: PositionCheck

    def divide(self, prepared: PreparedItem, piece_rows: int) -> PreparedItem:
        """Add pieces if the item can be divided and is long enough for several of `piece_rows` rows.

        Raises:
            PreprocessFailedError: for want of memory, for example.
        """
        modality = Modality.VIDEO.value
        (item,) = prepared.engine_input["mm_kwargs"][modality]
        try:
            steps = _divided_steps(item, prepared.num_embeds, piece_rows)
            if len(steps) < 2:
                return prepared
            rows_of_step = prepared.num_embeds // sum(steps)
            rows = [rows_of_step * each for each in steps]
            ends = [sum(steps[:number]) for number in range(len(steps) + 1)]
            items = [cut_steps(item, first, end) for first, end in pairwise(ends)]
            inputs = _inputs_of(prepared.engine_input, modality, items, rows)
            for each in inputs:
                self._check(each, modality)
        except Exception as error:  # NotInStepsError, or whatever the model's code makes of a part
            if is_transient(error):  # otherwise the item would be divided only sometimes
                raise PreprocessFailedError("the video was not divided") from error
            log.info("video not divided", error=repr(error)[:500])
            return prepared
        record = prepared.record.model_copy(update={"pieces": tuple(rows)})
        pieces = (
            PreparedItem(each, num_rows, len(each["prompt_token_ids"]), prepared.width, record)
            for each, num_rows in zip(inputs, rows, strict=True)
        )
        return replace(prepared, record=record, pieces=tuple(pieces))

    def _check(self, engine_input: dict[str, Any], modality: str) -> None:
        """Raise ValueError if the engine could not find the item's positions in its prompt."""
        (position,) = engine_input["mm_placeholders"][modality]
        (item,) = engine_input["mm_kwargs"][modality]
        tokens = engine_input["prompt_token_ids"][position.offset : position.offset + position.length]
        self.positions.check(modality, item, tokens, position.is_embed)


def _divided_steps(item: Any, num_rows: int, piece_rows: int) -> list[int]:
    """Steps of each piece; raises NotInStepsError if rows and steps do not match."""
    num = num_steps(item)
    rows_of_step, rest = divmod(num_rows, num)
    if rest or not rows_of_step:
        raise NotInStepsError("the rows are not as many for each step")
    return steps_of_pieces(num, rows_of_step, piece_rows)


def _inputs_of(
    engine_input: Any, modality: str, items: Sequence[Any], rows: Sequence[int]
) -> list[dict[str, Any]]:
    """One vLLM input for each piece: the prompt with that piece in place of the video.

    A piece keeps the text tokens on both of its sides: some models use them to find its rows' places.
    """
    tokens = list(engine_input["prompt_token_ids"])
    (mm_hash,) = engine_input["mm_hashes"][modality]
    (position,) = engine_input["mm_placeholders"][modality]
    behind_all = tokens[position.offset + position.length :]
    inputs = []
    first = position.offset
    for item, piece_hash, place in zip(
        items, piece_hashes(mm_hash, rows), divide_position(position, rows), strict=True
    ):
        end = place.offset + place.length
        mask = position.is_embed
        if mask is not None:
            mask = mask[first - position.offset : end - position.offset]
        inputs.append(
            {
                **engine_input,
                "prompt_token_ids": [*tokens[: position.offset], *tokens[first:end], *behind_all],
                "mm_kwargs": type(engine_input["mm_kwargs"])({modality: [item]}),
                "mm_hashes": {modality: [piece_hash]},
                "mm_placeholders": {
                    modality: [replace(position, length=end - first, is_embed=mask)],
                },
            }
        )
        first = _end_of_rows(place)
    return inputs


def _end_of_rows(place: Any) -> int:
    """First token after the piece's last row."""
    if place.is_embed is None:
        return int(place.offset + place.length)
    return int(place.offset + place.is_embed.nonzero().max()) + 1
