"""Interface between workers and transports, and the transport of every machine: shared memory.

    producer   write(place, tensor)            the bytes are at `place` when it returns; then the seal
    consumer   open(descriptor, on_release)    a tensor on the consumer's device; `on_release` when the pin
                                               may end: nothing reads the shared bytes any more

Others: `region.cuda.transports`, and the connector's `worker.transports`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from triptych_common.protocol.store import Descriptor
from triptych_common.region.fence import Place, check_reservation
from triptych_common.region.mapping import RegionMapping
from triptych_common.region.tensor_view import tensor_view, write_tensor

OnRelease = Callable[[], None]
OnWritten = Callable[[], None]
"""Ends a queued write; called once, in any thread, when the device has done it or nothing runs there."""


class TensorWriter(Protocol):
    def write(self, place: Place, tensor: torch.Tensor) -> None:
        """Copy `tensor` [num_embeds, width] to `place`; on return every consumer would read it right.

        Raises:
            StaleReservationError: the place is not reserved for this order any more; nothing was written.
            TriptychError: it could not be written. Nothing may be sealed.
        """

    def close(self) -> None: ...


@runtime_checkable
class QueuingWriter(TensorWriter, Protocol):
    """The producer's end of a transport whose copies a GPU makes, in the order of its stream."""

    def queue(self, place: Place, tensor: torch.Tensor) -> OnWritten:
        """Queue the copy of `tensor` on the current stream, without waiting for it.

        Every consumer would read it right once the stream has done its work; then the result is to be called.
        When `queue` raises, no copy is under way.

        Raises:
            StaleReservationError: as in `write`.
            TriptychError: it could not be queued. Nothing may be sealed.
        """


class TensorReader(Protocol):
    def open(self, descriptor: Descriptor, on_release: OnRelease) -> torch.Tensor:
        """Return the sealed tensor [num_embeds, width]. Never write to it.

        `on_release` is called once, in any thread; it must neither block nor raise. When `open` raises, it
        is not called.

        Raises:
            TriptychError: the tensor cannot be read; only requests that wait for it fail.
        """

    def close(self) -> None: ...


@dataclass(frozen=True)
class StartedCopy:
    """Target of a copy that a GPU may still run. Dropping it drops the copy."""

    tensor: torch.Tensor


@runtime_checkable
class StartingReader(TensorReader, Protocol):
    """The consumer's end of a transport whose copies can start before the step that needs them."""

    def start(self, descriptor: Descriptor) -> StartedCopy:
        """Queue the copy of a sealed tensor that stays pinned until `finish` or until the copy is dropped.

        Raises:
            TriptychError: the tensor cannot be read.
        """

    def finish(self, started: StartedCopy, on_release: OnRelease) -> torch.Tensor:
        """Return the tensor of `start`; `on_release` and errors are as in `open`."""


class SharedMemoryWriter:
    """Writer that copies once into the region, from any device."""

    def __init__(self, mapping: RegionMapping) -> None:
        self._mapping = mapping
        mapping.prepare_writes(0.0)  # in the background, so that the first tensor finds it ready

    def write(self, place: Place, tensor: torch.Tensor) -> None:
        check_reservation(self._mapping, place, tensor.nbytes)
        write_tensor(self._mapping, place.offset, tensor)

    def close(self) -> None:
        self._mapping.close()


class SharedMemoryReader:
    """Reader of the region's own memory, without a copy, for consumers on the CPU."""

    def __init__(self, mapping: RegionMapping) -> None:
        self._mapping = mapping

    def open(self, descriptor: Descriptor, on_release: OnRelease) -> torch.Tensor:
        return tensor_view(self._mapping, descriptor, on_release)

    def close(self) -> None:
        self._mapping.close()
