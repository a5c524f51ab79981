"""Parts of a gateway that depend on its settings alone and start nothing."""

from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from triptych_common.bus import AsyncBus
from triptych_common.coordination import EntryDirectory
from triptych_gateway.access.api_keys_watch import ApiKeysWatch
from triptych_gateway.access.auth import ApiKeys
from triptych_gateway.access.request_limiter import RequestLimiter
from triptych_gateway.encode.encode_orders import EncodeOrders
from triptych_gateway.encode.final_acks import FinalAcks
from triptych_gateway.files.encode_ahead import EncodeAhead
from triptych_gateway.files.expiry import ExpirySweep
from triptych_gateway.files.file_limits import FileLimits
from triptych_gateway.files.file_service import FileService
from triptych_gateway.files.file_store import FileStore
from triptych_gateway.files.known_files import KnownFiles
from triptych_gateway.files.uploads import FileUploads, UploadTimes
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.request.chat_request import RequestParser
from triptych_gateway.request.forms.form import RequestLimits
from triptych_gateway.request.forms.grammar_bounds import GrammarBounds
from triptych_gateway.request.image_header import ImageLimits
from triptych_gateway.request.item_checks import MediaLimits
from triptych_gateway.request.json_bounds import BodyBounds
from triptych_gateway.request.placeholder_tokens import PlaceholderGuard
from triptych_gateway.request.request_options import RequestOptions
from triptych_gateway.request.text_request import TextParser
from triptych_gateway.routing.instances import Instances
from triptych_gateway.routing.models_watch import ModelsWatch
from triptych_gateway.routing.registry_view import RegistryView
from triptych_gateway.routing.served_models import ServedModels
from triptych_gateway.settings import GatewaySettings
from triptych_gateway.transfers.directory_notes import DirectoryNotes
from triptych_gateway.transfers.fabric_view import FabricView
from triptych_gateway.transfers.link_rates import LinkRates
from triptych_gateway.transfers.transfer_limits import TransferLimits
from triptych_gateway.transfers.transfer_orders import TransferOrders


def file_watches(
    settings: GatewaySettings, api_keys: ApiKeys, models: ServedModels, threads: ThreadPoolExecutor
) -> Iterator[Coroutine[Any, Any, None]]:
    """Yield the watches of files that may change."""
    if settings.api_keys_file is not None:
        yield ApiKeysWatch(settings.api_keys_file, api_keys, settings.api_keys_check_s, threads).run()
    if settings.models_file is not None:
        yield ModelsWatch(settings.models_file, models, settings.models_check_s, threads).run()


def media_limits(settings: GatewaySettings) -> MediaLimits:
    image_limits = ImageLimits(settings.max_image_pixels, settings.image_formats)
    return MediaLimits(settings.max_item_bytes, image_limits, settings.video_piece_rows)


def encode_ahead(
    settings: GatewaySettings,
    orders: EncodeOrders,
    final_acks: FinalAcks,
    view: RegistryView,
    metrics: GatewayMetrics,
) -> EncodeAhead | None:
    """Return the encoder of uploads ahead of requests, or None if that is off."""
    if not settings.files_encode_ahead or settings.encode_decision == "local":
        return None
    return EncodeAhead(
        orders=orders,
        final_acks=final_acks,
        view=view,
        metrics=metrics,
        timeout_s=settings.first_token_timeout_s,
        video_piece_rows=settings.video_piece_rows,
    )


def file_service(
    settings: GatewaySettings,
    limiter: RequestLimiter,
    ahead: EncodeAhead | None,
    upload_threads: ThreadPoolExecutor,
    threads: ThreadPoolExecutor,
    list_threads: ThreadPoolExecutor,
    metrics: GatewayMetrics,
) -> FileService | None:
    """Return the service of uploaded files, or None without a directory."""
    if settings.files_dir is None:
        return None
    limits = FileLimits(
        max_file_bytes=min(settings.files_max_file_bytes, settings.max_item_bytes),
        max_bytes=settings.files_max_bytes,
        max_files=settings.files_max_files,
        max_key_bytes=settings.files_max_key_bytes,
        max_key_files=settings.files_max_key_files,
        lifetime_s=settings.files_lifetime_s,
        max_lifetime_s=settings.files_max_lifetime_s,
    )
    store = FileStore(settings.files_dir, limits)
    times = UploadTimes(settings.body_timeout_s, settings.files_upload_timeout_s)
    uploads = FileUploads(
        store, media_limits(settings), limiter, upload_threads, times, settings.files_max_uploads
    )
    expiry, known = ExpirySweep(store, list_threads), KnownFiles(store, threads)
    return FileService(store, uploads, known, expiry, ahead, threads, list_threads, metrics)


def transfer_orders(
    settings: GatewaySettings,
    bus: AsyncBus,
    orders: EncodeOrders,
    fabric: FabricView,
    rates: LinkRates,
    metrics: GatewayMetrics,
) -> TransferOrders:
    """Build the transfer orders, with a directory bounded as the sizes: both have recent items."""
    directory = EntryDirectory(bus, max_items=settings.sizes_redis_items, ttl_s=settings.sizes_ttl_s)
    return TransferOrders(
        bus=bus,
        gateway=settings.instance,
        fabric=fabric,
        orders=orders,
        notes=DirectoryNotes(directory, settings.publish_timeout_s),
        rates=rates,
        limits=TransferLimits(
            max_attempts=settings.max_transfer_attempts,
            grace_s=settings.transfer_grace_s,
            publish_timeout_s=settings.publish_timeout_s,
        ),
        metrics=metrics,
    )


def request_parsers(
    settings: GatewaySettings, threads: ThreadPoolExecutor, instances: Instances
) -> tuple[RequestParser, TextParser]:
    guard = PlaceholderGuard(
        settings.placeholder_tokens, settings.max_body_values, instances.placeholder_tokens_of
    )
    limits = RequestLimits(
        BodyBounds(settings.max_prompt_bytes, settings.max_body_values),
        settings.max_messages,
        settings.max_choices,
        settings.max_answer_tokens,
        settings.max_logprobs,
        grammars=GrammarBounds(max_chars=settings.max_grammar_chars),
    )
    options = RequestOptions(settings.request_processor_options, settings.media_options)
    return (
        RequestParser(guard, settings.max_items, limits, options, threads),
        TextParser(guard, limits, options, threads),
    )
