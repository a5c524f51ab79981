"""Reader and writer of each transport for one worker, by the memory an order names; opened on first use."""

import contextlib

import torch

from triptych_common.coordination import BlobStore
from triptych_common.domain.errors import StoreUnavailableError, TriptychError
from triptych_common.protocol.store import REDIS, SHM, Descriptor
from triptych_common.region import RegionMapping
from triptych_common.region.cuda.driver import CudaError
from triptych_common.region.cuda.loading import load_driver
from triptych_common.region.cuda.release import OnDone
from triptych_common.region.cuda.transports import TorchDevice
from triptych_common.region.fence import Place
from triptych_common.region.tensor_view import TORCH_DTYPES
from triptych_common.region.transport import (
    OnRelease,
    SharedMemoryReader,
    SharedMemoryWriter,
    TensorReader,
    TensorWriter,
)
from triptych_common.store_session import StoreSession
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.config import ConnectorConfig, StoreConfig
from triptych_vllm_connector.readable import blob_place
from triptych_vllm_connector.slab_probe import MAX_FAILURE_CHARS, SlabProbeResult
from triptych_vllm_connector.worker.cuda_transports import GpuTransports

log = get_logger(__name__)


class RedisWriter:
    """Writes a tensor's bytes under a Redis key of their own; the entry's blocks in the region stay empty."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs

    def write(self, place: Place, tensor: torch.Tensor) -> None:
        flat = tensor.detach().contiguous().cpu().view(torch.uint8).reshape(-1)
        self._blobs.put(blob_place(place), memoryview(flat.numpy()))

    def close(self) -> None:
        self._blobs.close()


class RedisReader:
    """Reads a tensor into memory of its own, so that the pin ends at once."""

    def __init__(self, blobs: BlobStore, device: str) -> None:
        self._blobs = blobs
        self._device = device

    def open(self, descriptor: Descriptor, on_release: OnRelease) -> torch.Tensor:
        spec = descriptor.spec
        data = bytearray(self._blobs.get(blob_place(descriptor), spec.num_bytes))
        tensor = torch.frombuffer(data, dtype=TORCH_DTYPES[spec.dtype]).view(spec.shape).to(self._device)
        on_release()
        return tensor

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._blobs.close()


class WorkerTransports:
    """Transports of one store session, for vLLM's thread."""

    def __init__(self, config: StoreConfig, session: StoreSession, device_type: str) -> None:
        self._config = config
        self._session = session
        self._device_type = device_type
        self._region: RegionMapping | None = None
        self._gpu = None if device_type == "cpu" else self._make_gpu()
        self._writers: dict[str, TensorWriter] = {}  # by memory
        self._readers: dict[str, TensorReader] = {}
        if config.transport != "redis":
            self._prepare_region()
        log.info("transports ready", transport=config.transport, device=device_type)

    def writer(self, memory: str) -> TensorWriter:
        """Writer for `memory`; raises TriptychError if it cannot be written from here."""
        if memory not in self._writers:
            self._writers[memory] = self._make_writer(memory)
        return self._writers[memory]

    def reader(self, memory: str) -> TensorReader:
        """Reader for `memory`; raises TriptychError if it cannot be read from here."""
        if memory not in self._readers:
            self._readers[memory] = self._make_reader(memory)
        return self._readers[memory]

    def call_when_done(self, on_done: OnDone) -> None:
        """Have a thread call `on_done` once the GPU has done what is queued now.

        Raises:
            CudaError: this worker queues nothing.
        """
        if self._gpu is None:
            raise CudaError("this worker has no GPU")
        self._gpu.call_when_done(on_done)

    def region(self) -> RegionMapping:
        """Mapping of the region; raises StoreUnavailableError if it cannot be mapped."""
        if self._region is None:
            welcome = self._session.welcome
            self._region = RegionMapping.open(welcome.region_path, welcome.region_num_bytes, writable=True)
        return self._region

    def extent(self, memory: str) -> tuple[int, int] | None:
        """Address and bytes of `memory` as mapped here; None if it is not."""
        if memory == SHM and self._region is not None:
            return self._region.address, self._region.num_bytes
        return None if self._gpu is None or memory in (SHM, REDIS) else self._gpu.slab_extent()

    def probe_slab(self) -> SlabProbeResult:
        """Result of trying the current store's slab. Never raises."""
        generation = self._session.welcome.generation
        device: str | None = None
        failure: str | None = None
        try:
            if self._gpu is None:
                raise CudaError("this worker has no GPU")
            device = self._gpu.device_uuid()
            self._gpu.probe_slab()
        except (TriptychError, ValueError, RuntimeError, MemoryError) as error:
            failure = str(error)[:MAX_FAILURE_CHARS]
        if self._session.welcome.generation != generation:
            failure = failure or "the store was restarted meanwhile"
        return SlabProbeResult(device, generation, failure)

    def on_outage(self) -> None:
        """Let go of a store's device memory that does not answer any more. Called in any thread."""
        if self._gpu is not None:
            self._gpu.suspend_slab()

    def on_reconnect(self, generation: int) -> None:
        """Use device memory again if the store of `generation` was only away. Called in any thread."""
        if self._gpu is not None:
            self._gpu.resume_slab(generation)

    def close(self) -> None:
        while self._writers:
            self._writers.popitem()[1].close()
        while self._readers:
            self._readers.popitem()[1].close()
        if self._gpu is not None:
            self._gpu.close()

    def _prepare_region(self) -> None:
        """Map the region before the first tensor: pages enter the page table, and a GPU locks them."""
        try:
            self.region()
        except StoreUnavailableError as error:
            if self._config.transport != "auto":
                raise
            log.warning("the region cannot be mapped", error=str(error))
            return
        if self._gpu is not None:
            self._gpu.try_register()

    def _make_writer(self, memory: str) -> TensorWriter:
        if memory == REDIS:
            return RedisWriter(self._blobs())
        if self._gpu is not None:
            return self._gpu.region_writer() if memory == SHM else self._gpu.slab_writer()
        if memory == SHM:
            return SharedMemoryWriter(self.region())
        raise StoreUnavailableError(f"memory {memory} cannot be written from here")

    def _make_reader(self, memory: str) -> TensorReader:
        if memory == REDIS:
            return RedisReader(self._blobs(), self._device_type)
        if self._gpu is not None:
            return self._gpu.region_reader() if memory == SHM else self._gpu.slab_reader()
        if memory == SHM:
            return SharedMemoryReader(self.region())
        raise StoreUnavailableError(f"memory {memory} cannot be read from here")

    def _make_gpu(self) -> GpuTransports:
        index = torch.cuda.current_device()
        try:
            driver = load_driver(index)
        except CudaError as error:
            log.warning("only plain copies to the GPU", error=str(error))
            driver = None
        return GpuTransports(
            driver, TorchDevice(index), self._device_type, self.region, lambda: self._session.welcome
        )

    def _blobs(self) -> BlobStore:
        """Client of Redis; raises StoreUnavailableError if this engine has none."""
        config = self._config
        if not isinstance(config, ConnectorConfig):
            raise StoreUnavailableError("this engine has no Redis")
        return BlobStore(config.redis_url, config.deployment, client_name=f"{config.instance}/tensors")
