"""Worker of a plain engine: loads pinned tensors into vLLM's encoder cache, saves encoder outputs."""

from collections.abc import Callable, MutableMapping, Sequence

import torch

from triptych_common.domain.errors import SpecMismatchError, StoreUnavailableError, TriptychError
from triptych_common.protocol.store import (
    AlreadySealed,
    Ping,
    Pinned,
    PinOrWatch,
    Reserve,
    Reserved,
    StoreFailure,
    Unwatch,
    Watching,
)
from triptych_common.region.tensor_view import tensor_spec
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.config import StoreConfig
from triptych_vllm_connector.plain.bounded_calls import BoundedCalls
from triptych_vllm_connector.plain.reopened import Reopened
from triptych_vllm_connector.plain.store_pins import StorePin
from triptych_vllm_connector.step_orders import LoadOrder, WriteOrder
from triptych_vllm_connector.worker.loading import LoadingWorker
from triptych_vllm_connector.worker.writing import WritingWorker

log = get_logger(__name__)

PIN_ANEW_TIMEOUT_S = 10.0
WRITE_TIMEOUT_S = 60.0  # of a step's encode on the GPU, and its copies
SAVES_SUFFIX = "-saves"  # to the instance's name: a second session of the same worker


class SavingWorker(WritingWorker):
    """Worker of rank 0: reserves, writes and seals encoder outputs in the step that makes them.

    An output that cannot be saved is encoded again where it is needed.
    """

    def __init__(self, config: StoreConfig, device_type: str) -> None:
        super().__init__(config, 0, device_type)
        self._calls = BoundedCalls(config.store_timeout_s)

    def save_item(self, mm_hash: str, tensor: torch.Tensor) -> None:
        """Save an encoder output unless the store has it.

        Raises:
            torch.AcceleratorError: the device is lost, and the engine ends with it.
        """
        try:
            spec = tensor_spec(tensor)
        except SpecMismatchError as error:
            log.warning("encoder output cannot be saved", mm_hash=mm_hash, error=str(error))
            return
        reply = self._calls.try_call(self._session, Reserve(seq=0, mm_hash=mm_hash, spec=spec))
        if isinstance(reply, Reserved):
            self.write_order(_order(mm_hash, reply, tensor), tensor)
        elif isinstance(reply, StoreFailure):
            log.warning("encoder output not saved", mm_hash=mm_hash, code=reply.code, detail=reply.detail)
        elif not isinstance(reply, AlreadySealed):
            log.warning("encoder output not saved", mm_hash=mm_hash, code="unavailable")

    def wait_for_seals(self) -> None:
        """Wait until all written entries are sealed: the store runs a session's commands in order.

        Raises:
            CudaError: the GPU has failed, and the engine ends with it.
        """
        self.seal_when_done()
        if not self.wait_written(WRITE_TIMEOUT_S):
            log.warning("encoder outputs not written yet", timeout_s=WRITE_TIMEOUT_S)
        self._calls.try_call(self._session, Ping(seq=0))


def _order(mm_hash: str, reserved: Reserved, tensor: torch.Tensor) -> WriteOrder:
    return WriteOrder(
        mm_hash=mm_hash,
        job_id="",
        reservation_id=reserved.reservation_id,
        offset=reserved.offset,
        num_embeds=tensor.shape[0],
        width=tensor.shape[1],
        dtype=str(tensor.dtype).removeprefix("torch."),
        generation=reserved.generation,
        memory=reserved.memory,
    )


class PlainLoader(LoadingWorker):
    """Loads tensors and retries: vLLM's scheduler cannot fail the requests of an unreadable tensor."""

    def load(self, mm_hash: str, pin: StorePin) -> torch.Tensor:
        """Load the pinned tensor, with a new pin if the store has restarted.

        Raises:
            TriptychError: it cannot be had. The step is planned with it, so the engine ends.
        """
        if pin.region_id != self.region_id:  # its number may be another pin's by now
            return self.load_anew(mm_hash)
        tensor = self._try_load(LoadOrder(mm_hash, pin.pin_id, pin.descriptor))
        return self.load_anew(mm_hash) if tensor is None else tensor

    def load_anew(self, mm_hash: str) -> torch.Tensor:
        """Load by a new pin of this session, because the given one belongs to a store that is gone.

        Raises:
            TriptychError: as in `load`.
        """
        reply = self._session.request(PinOrWatch(seq=0, mm_hash=mm_hash), PIN_ANEW_TIMEOUT_S)
        if isinstance(reply, Watching):
            self._session.submit(Unwatch(seq=0, mm_hash=mm_hash))
        tensor = None
        if isinstance(reply, Pinned):
            tensor = self._try_load(LoadOrder(mm_hash, reply.pin_id, reply.descriptor))
        if tensor is None:
            raise StoreUnavailableError(f"the store lost {mm_hash} after vLLM had planned a step with it")
        return tensor

    def give_back(self, pin: StorePin) -> None:
        """End an unused pin; a pin of another region ended with its store."""
        if pin.region_id == self.region_id:
            self._released.put(pin.pin_id)

    def _try_load(self, order: LoadOrder) -> torch.Tensor | None:
        loaded: dict[str, torch.Tensor] = {}
        self.load_orders(loaded, [order])
        self.take_loaded()
        return None if self.take_failed_loads() else loaded[order.mm_hash]


class PlainWorker:
    """Loads and saves for one rank, on vLLM's thread; `hash_of` as in `WantedItems`."""

    def __init__(
        self, config: StoreConfig, rank: int, device_type: str, hash_of: Callable[[str], str], *, saves: bool
    ) -> None:
        self._hash_of = hash_of
        self._loader = Reopened(lambda: PlainLoader(config, rank, device_type))
        self._saver: Reopened[SavingWorker] | None = None
        if saves and rank == 0:
            saving = config.model_copy(update={"instance": config.instance + SAVES_SUFFIX})
            self._saver = Reopened(lambda: SavingWorker(saving, device_type))
            self._saver.try_get()
        self._loader.try_get()  # now, not with the first tensor: the region's pages are entered
        self._to_save: dict[str, None] = {}  # items of the current step
        self._has_saved = False  # in the step under way
        self._encoder_cache: MutableMapping[str, torch.Tensor] = {}

    def load_items(
        self, encoder_cache: MutableMapping[str, torch.Tensor], loads: dict[str, StorePin]
    ) -> None:
        """Load items that `encoder_cache` does not have.

        Raises:
            TriptychError: a tensor cannot be had. The engine ends with it.
        """
        for identifier, pin in loads.items():
            if identifier in encoder_cache:
                self._give_back(pin)
                continue
            mm_hash = self._hash_of(identifier)
            try:
                encoder_cache[identifier] = self._loader_for(pin).load(mm_hash, pin)
            except TriptychError as error:
                log.error(  # noqa: TRY400 -- the engine ends with this error, and prints it
                    "planned item not loaded", identifier=identifier, error=str(error)
                )
                raise

    def on_step_start(self, encoder_cache: MutableMapping[str, torch.Tensor], saves: Sequence[str]) -> None:
        """Start a step; items in `saves` are saved at its end if the encoder cache has them."""
        self._encoder_cache = encoder_cache
        self._to_save = dict.fromkeys(saves)
        saver = self._saver.try_get() if self._saver is not None and saves else None
        if saver is not None:
            saver.on_encode_start()

    def on_encoded(self, identifier: str, tensor: torch.Tensor) -> None:
        saver = self._saver.try_get() if self._saver is not None else None
        self._to_save.pop(identifier, None)
        if saver is not None:
            saver.save_item(self._hash_of(identifier), tensor)
            self._has_saved = True

    def on_step_end(self) -> None:
        """Save items encoded in earlier steps again, since the store may have evicted them."""
        for identifier in [each for each in self._to_save if each in self._encoder_cache]:
            self.on_encoded(identifier, self._encoder_cache[identifier])
        self._to_save, self._encoder_cache = {}, {}
        has_saved, self._has_saved = self._has_saved, False
        saver = self._saver.try_get() if self._saver is not None and has_saved else None
        if saver is not None:
            saver.wait_for_seals()

    def close(self) -> None:
        self._loader.close()
        if self._saver is not None:
            self._saver.close()

    def _give_back(self, pin: StorePin) -> None:
        loader = self._loader.opened or self._loader.try_get()
        if loader is not None:
            loader.give_back(pin)

    def _loader_for(self, pin: StorePin) -> PlainLoader:
        """Loader on the pin's region if that is mapped, else on the current store's region.

        Raises:
            TriptychError: there is no store.
        """
        loader = self._loader.opened
        if loader is not None and loader.region_id != pin.region_id:
            self._loader.close()
        elif loader is not None:
            return loader
        return self._loader.get()
