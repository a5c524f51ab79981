"""prefill_decode: gives the renderer records in place of media.

A request names its items by uuid only, in their places, and brings their records beside the prompt. The
renderer asks its cache of processed items for them and replays what the encoder's renderer has made. A record
is checked before vLLM sees it; a wrong one ends its request with 400, and nothing else.
"""

import asyncio
import dataclasses
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import orjson
import torch
from pydantic import ValidationError
from vllm.entrypoints.anthropic import api_router as messages_router
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion import api_router as chat_router
from vllm.entrypoints.openai.responses import api_router as responses_router
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import (
    BaseMultiModalField,
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
)
from vllm.multimodal.processing import BaseProcessingInfo
from vllm.multimodal.processing.processor import PromptUpdateDetails, ResolvedPromptUpdate, UpdateMode
from vllm.renderers.base import BaseRenderer
from vllm.utils.async_utils import make_async
from vllm.v1.engine.async_llm import AsyncLLM

from triptych_common.domain.transient import is_transient
from triptych_common.protocol.item_record import Batching, ItemRecord, PlaceholderUpdate, RecordField
from triptych_common.protocol.item_urls import parse_item_url
from triptych_common.protocol.messages import ECTransferParams, ItemTransfer, Modality
from triptych_vllm_connector.pieces import divide_feature
from triptych_vllm_connector.records.item_fields import is_for_language_model
from triptych_vllm_connector.records.packing import unpack_tensor, unpack_tokens, unpack_value
from triptych_vllm_connector.records.positions import PositionCheck
from triptych_vllm_connector.records.recording import ItemCache
from triptych_vllm_connector.seams.current import seam
from triptych_vllm_connector.seams.replacing import replace

request_items: ContextVar[Mapping[str, ItemTransfer]] = ContextVar("triptych_request_items")
"""Items of the request being served, by mm_hash."""

StockParser: Any = seam.content_parser()[0]
Processed = tuple[MultiModalKwargsItem | None, Sequence[ResolvedPromptUpdate]]
Create = Callable[..., Awaitable[Any]]


class ItemUrlParser(StockParser):
    """vLLM's parser of content parts, which also takes images that an item's URL names.

    vLLM turns requests of `/v1/messages` and the like into chats by itself, and their parts cannot have a
    uuid. An item's URL becomes what a part with the item's uuid is in a chat completion.
    """

    def parse_image(self, image_url: str | None, uuid: str | None = None) -> None:
        """Parse an image part; raises VLLMValidationError if the URL names no item of its request."""
        try:
            named = None if image_url is None else parse_item_url(image_url)
        except ValueError as error:
            raise _refused(str(error)) from error
        if named is None:
            super().parse_image(image_url, uuid)
        elif named.data_url is not None:
            super().parse_image(named.data_url, named.item_id)
        else:
            item = request_items.get({}).get(named.item_id)
            if item is None or item.modality is not Modality.IMAGE:
                raise _refused("the URL of a media item that the request does not have")
            self.parse_image_embeds(None, named.item_id)


def read_item_urls() -> None:
    """Replace vLLM's parser of content parts in this process."""
    replace(
        sys.modules[StockParser.__module__],
        StockParser.__name__,
        ItemUrlParser,
        used_by=(seam.content_parser()[1],),
    )


def _refused(message: str) -> Exception:
    return VLLMValidationError(message, parameter="messages")


class RecordedItems(ItemCache):
    """Cache of a renderer that processes one request at a time, holding that request's items."""

    def __init__(self, check: PositionCheck, vocab_size: int, max_num_tokens: int) -> None:
        self._check = check
        self._vocab_size = vocab_size
        self._max_num_tokens = max_num_tokens
        self.items: Mapping[str, ItemTransfer] = {}

    def has(self, modality: str) -> bool:
        return any(item.modality == modality for item in self.items.values())

    def is_cached_item(self, mm_hash: str) -> bool:
        return mm_hash in self.items

    def get_and_update_item(
        self, mm_item: tuple[MultiModalKwargsItem, Sequence[ResolvedPromptUpdate]] | None, mm_hash: str
    ) -> Processed:
        if mm_item is not None:
            return mm_item
        transfer = self.items[mm_hash]
        if transfer.record is None:
            raise ValueError("an item without its record")
        return self._replay(transfer.modality.value, transfer.record, transfer.num_embeds)

    def _replay(self, modality: str, record: ItemRecord, num_embeds: int) -> Processed:
        """Replay a record; raises ValueError if it is not of an item of this model."""
        item = MultiModalKwargsItem({field.name: _element(field) for field in record.fields})
        updates = [_update(modality, each) for each in record.updates]
        for update in updates:
            tokens = update.content.full
            if not 0 < len(tokens) < self._max_num_tokens:
                raise ValueError("the item is longer than the model's context")
            if min(tokens) < 0 or max(tokens) >= self._vocab_size:
                raise ValueError("the item's tokens are not the model's")
            is_embed = None if update.content.is_embed is None else update.content.is_embed(tokens)
            if (len(tokens) if is_embed is None else int(is_embed.sum())) != num_embeds:
                raise ValueError("the item's record has other rows than the item")
            self._check.check(modality, item, tokens, is_embed)
        if record.pieces and sum(record.pieces) != num_embeds:
            raise ValueError("the record's pieces have other rows than the item")
        return item, updates


_FIELDS: Mapping[Batching, Callable[[RecordField], BaseMultiModalField]] = {
    Batching.BATCHED: lambda field: MultiModalBatchedField(keep_on_cpu=field.keep_on_cpu),
    Batching.FLAT: lambda field: MultiModalFlatField(
        slices=[slice(None)], dim=field.dim, keep_on_cpu=field.keep_on_cpu
    ),
    Batching.SHARED: lambda field: MultiModalSharedField(batch_size=1, keep_on_cpu=field.keep_on_cpu),
}


def _element(field: RecordField) -> MultiModalFieldElem:
    return MultiModalFieldElem(data=unpack_value(field.value), field=_FIELDS[field.batching](field))


def _update(modality: str, recorded: PlaceholderUpdate) -> ResolvedPromptUpdate:
    mask = None if recorded.is_embed is None else unpack_tensor(recorded.is_embed)
    details = PromptUpdateDetails(
        unpack_tokens(recorded.tokens), None if mask is None else partial(_recorded_mask, mask)
    )
    return ResolvedPromptUpdate(modality, 0, UpdateMode(recorded.mode), list(recorded.target), details)


def _recorded_mask(mask: torch.Tensor, full: list[int]) -> torch.Tensor:
    return mask


def replay_records(
    engine: Any, state: Any, placeholder_tokens: Sequence[str], *, renders_media: bool = False
) -> None:
    """Make vLLM's chat endpoints take items with records instead of media.

    Args:
        engine: vLLM's client, whose renderer and input processor run in this process.
        state: of vLLM's application, whose endpoints ask them.
        renders_media: raw media are taken, too, for the prompt's tokens and positions alone: the engine
            encodes nothing, and gets no pixels.
    """
    renderer, model_config = engine.renderer, engine.model_config
    cache = RecordedItems(
        PositionCheck.of_model(model_config), model_config.get_vocab_size(), model_config.max_model_len
    )
    process = renderer._process_multimodal

    def process_with(items: Mapping[str, ItemTransfer], *args: Any, **kwargs: Any) -> Any:
        """Process with these items, in the renderer's single thread for media."""
        cache.items = items
        try:
            return process(*args, **kwargs)
        except Exception as error:  # whatever vLLM makes of a record that is not of this prompt
            if not items or is_transient(error) or isinstance(error, ValueError):
                raise
            raise ValueError("the items do not fit the prompt") from error
        finally:
            cache.items = {}

    in_thread = make_async(process_with, executor=renderer._mm_executor)

    def process_async(*args: Any, **kwargs: Any) -> Awaitable[Any]:
        return in_thread(request_items.get({}), *args, **kwargs)

    replace(renderer, "_mm_processor_cache", cache, used_by=(BaseRenderer._process_multimodal,))
    replace(
        renderer, "_process_multimodal_async", process_async, used_by=(BaseRenderer._process_tokens_async,)
    )
    info = renderer.get_mm_processor().info
    _let_items_pass(info, cache, are_all_items=renders_media)
    metadata_only = MetadataOnly(info.data_parser.placeholder_metadata_fields) if renders_media else None
    _divide_items_of(engine.input_processor, metadata_only)
    read_item_urls()
    chat, messages = state.openai_serving_chat, state.anthropic_serving_messages
    for serving, user in (
        (chat, chat_router.create_chat_completion),
        (messages, AnthropicServingMessages.create_messages),
    ):
        create = _taking_records(serving, serving.create_chat_completion)
        replace(serving, "create_chat_completion", create, used_by=(user,))
    responses = state.openai_serving_responses
    create_responses = _taking_records(responses, responses.create_responses)
    create_responses = _refusing_placeholders(responses, create_responses, placeholder_tokens)
    replace(responses, "create_responses", create_responses, used_by=(responses_router.create_responses,))
    count = _taking_records_of_count(messages, messages.count_tokens)
    replace(messages, "count_tokens", count, used_by=(messages_router.count_tokens,))


class MetadataOnly:
    """Strips the encoder's fields from items, for an engine that encodes nothing."""

    def __init__(self, declared_fields: Callable[[str], Collection[str]]) -> None:
        """`declared_fields` returns a modality's fields that vLLM's parser declares for language models."""
        self._declared_fields = declared_fields

    def strip(self, feature: Any) -> Any:
        """Return `feature`, vLLM's `MultiModalFeatureSpec`, with the fields of a record (`recording`)."""
        if feature.data is None:
            return feature
        declared = self._declared_fields(feature.modality)
        data = MultiModalKwargsItem(
            {
                name: element
                for name, element in feature.data.items()
                if is_for_language_model(name, element, declared)
            }
        )
        return dataclasses.replace(feature, data=data)


def _let_items_pass(info: Any, cache: RecordedItems, *, are_all_items: bool) -> None:
    """Lift the item limit for items with records; it is 0 where raw media of a modality are not served."""
    users = (BaseProcessingInfo.parse_mm_data,)
    if are_all_items:  # its parser of content parts makes an `info` of its own for each request
        replace(type(info), "validate_num_items", lambda self, modality, num_items: None, used_by=users)
        return
    validate = info.validate_num_items

    def validate_num_items(modality: str, num_items: int) -> None:
        if not cache.has(modality):
            validate(modality, num_items)

    replace(info, "validate_num_items", validate_num_items, used_by=users)


def _divide_items_of(processor: Any, metadata_only: MetadataOnly | None = None) -> None:
    """Divide each item of the prompt into the pieces that the store holds, before the engine gets it."""
    process = processor.process_inputs

    def process_inputs(*args: Any, **kwargs: Any) -> Any:
        request = process(*args, **kwargs)
        if request.mm_features and request.sampling_params is not None:
            pieces = _pieces_of(request.sampling_params.extra_args or {})
            request.mm_features = [
                part
                for feature in request.mm_features
                for part in divide_feature(feature, pieces.get(feature.identifier, ()))
            ]
        if request.mm_features and metadata_only is not None:
            request.mm_features = [metadata_only.strip(each) for each in request.mm_features]
        return request

    process_async = make_async(process_inputs, executor=processor.renderer._executor)
    replace(processor, "process_inputs", process_inputs, used_by=(AsyncLLM.add_request,))
    replace(processor, "process_inputs_async", process_async, used_by=(AsyncLLM.add_request,))


def _pieces_of(extra_args: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Pieces by mm_hash; none for invalid parameters, whose request the engine's own check ends."""
    try:
        params = ECTransferParams.model_validate(extra_args.get("ec_transfer_params"))
    except ValidationError:
        return {}
    return {item.mm_hash: item.pieces for item in params.items}


def _taking_records(serving: Any, create: Create) -> Create:
    """Wrap `create` for requests with `ec_transfer_params`."""

    async def create_with_items(request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            params = _params_of(request.ec_transfer_params)
        except ValidationError as error:
            return _refusal(serving, error)
        if params is not None:
            request.ec_transfer_params = params.without_records().model_dump(mode="json")
        _name_items(params)
        return await create(request, *args, **kwargs)

    return create_with_items


def _refusing_placeholders(serving: Any, create: Create, placeholder_tokens: Sequence[str]) -> Create:
    """Wrap `create` to refuse a response that continues one whose text contains a placeholder.

    vLLM puts that text into the prompt, and the gateway, which checks all other texts, does not have it.
    """

    async def create_after_check(request: Any, *args: Any, **kwargs: Any) -> Any:
        previous = serving.response_store.get(request.previous_response_id)
        if previous is not None:
            text = await asyncio.to_thread(previous.model_dump_json, include={"output"})
            if any(token in text for token in placeholder_tokens):
                message = "the text of the previous response holds a placeholder of the model"
                return serving.create_error_response(message)
        return await create(request, *args, **kwargs)

    return create_after_check


def _taking_records_of_count(serving: Any, count: Create) -> Create:
    """Wrap `count`, whose `ec_transfer_params` vLLM drops because nothing is generated."""

    async def count_with_items(request: Any, raw_request: Any) -> Any:
        try:
            params = _params_of((await raw_request.json()).get("ec_transfer_params"))
        except ValidationError as error:
            return _refusal(serving, error)
        _name_items(params)
        return await count(request, raw_request)

    return count_with_items


def _params_of(sent: Any) -> ECTransferParams | None:
    """Validated transfer parameters; raises ValidationError."""
    return None if sent is None else ECTransferParams.model_validate_json(orjson.dumps(sent), strict=True)


def _name_items(params: ECTransferParams | None) -> None:
    request_items.set({} if params is None else {item.mm_hash: item for item in params.items})


def _refusal(serving: Any, error: ValidationError) -> Any:
    return serving.create_error_response(f"ec_transfer_params are not valid: {error.error_count()} faults")
