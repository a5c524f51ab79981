"""Copies are exact whatever their size and place, streamed or not. No times asserted."""

import ctypes
import random

import pytest

from triptych_common.region.streaming import LINE_BYTES, MIN_STREAMED_BYTES, Copier

GUARD = 256
SOME = MIN_STREAMED_BYTES


@pytest.fixture(scope="module")
def copier() -> Copier:
    copier = Copier()
    assert copier.wait_loaded(30.0), "llvmlite comes with vLLM"
    return copier


@pytest.mark.parametrize("num_bytes", [1, 63, 64, SOME - 1, SOME, SOME + 1, SOME + LINE_BYTES - 1, 3 * SOME])
@pytest.mark.parametrize("target_shift", [0, 1, 32])
@pytest.mark.parametrize("source_shift", [0, 2])
def test_all_bytes_arrive_and_no_others_change(
    copier: Copier, num_bytes: int, target_shift: int, source_shift: int
) -> None:
    data = random.Random(num_bytes).randbytes(num_bytes + source_shift)
    source = ctypes.create_string_buffer(data, len(data))
    target = ctypes.create_string_buffer(b"\xee" * (num_bytes + 3 * GUARD), num_bytes + 3 * GUARD)
    start = -ctypes.addressof(target) % LINE_BYTES + GUARD - LINE_BYTES + target_shift
    copier.copy(ctypes.addressof(target) + start, ctypes.addressof(source) + source_shift, num_bytes)
    assert target.raw[start : start + num_bytes] == data[source_shift:]
    assert set(target.raw[:start]) == set(target.raw[start + num_bytes :]) == {0xEE}


def test_a_large_copy_streams(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed: list[int] = []
    stream = copier._stream
    assert stream is not None

    def note(target: int, source: int, num_bytes: int) -> object:
        streamed.append(num_bytes)
        return stream(target, source, num_bytes)

    monkeypatch.setattr(copier, "_stream", note)
    size = 2 * SOME + 5
    source, target = ctypes.create_string_buffer(size), ctypes.create_string_buffer(size + LINE_BYTES)
    start = ctypes.addressof(target) + -ctypes.addressof(target) % LINE_BYTES
    copier.copy(start, ctypes.addressof(source), size)
    copier.copy(start, ctypes.addressof(source), SOME - 1)
    copier.copy(start + 1, ctypes.addressof(source), size)
    assert streamed == [2 * SOME]


def test_without_the_compiler_libc_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("no llvmlite")

    monkeypatch.setattr("triptych_common.region.streaming._compiled", missing)
    copier = Copier()
    assert not copier.wait_loaded(10.0)
    data = random.Random(1).randbytes(SOME)
    source, target = ctypes.create_string_buffer(data, SOME), ctypes.create_string_buffer(SOME)
    copier.copy(ctypes.addressof(target), ctypes.addressof(source), SOME)
    assert target.raw == data
