"""The program that loses packets, run here on frames of our own."""

from ipaddress import IPv4Address

import pytest

from tests.support.hosts.packet_filters import loss_program

NEAR, FAR = IPv4Address("10.213.7.1"), IPv4Address("10.213.7.2")
PASSES, IS_LOST = 0, 2
RANDOM_AT = 0xFFFFF038
HIGHEST = 2**32 - 1


def frame_to(address: IPv4Address, ethertype: int = 0x0800) -> bytes:
    return bytes(12) + ethertype.to_bytes(2, "big") + bytes(16) + address.packed + bytes(20)


def verdict(program: str, frame: bytes, random_number: int = 0) -> int:
    """What the kernel's interpreter returns."""
    number, *lines = program.split(",")
    code = [tuple(map(int, line.split())) for line in lines]
    assert len(code) == int(number)
    at, accumulator = 0, 0
    while True:
        operation, jump_true, jump_false, operand = code[at]
        at += 1
        match operation:
            case 0x28:
                accumulator = int.from_bytes(frame[operand : operand + 2], "big")
            case 0x20 if operand == RANDOM_AT:
                accumulator = random_number
            case 0x20:
                accumulator = int.from_bytes(frame[operand : operand + 4], "big")
            case 0x15:
                at += jump_true if accumulator == operand else jump_false
            case 0x25:
                at += jump_true if accumulator > operand else jump_false
            case 0x06:
                return operand
            case _:
                pytest.fail(f"no such instruction: {operation}")


def test_without_losses_all_passes() -> None:
    assert verdict(loss_program({}), frame_to(NEAR)) == PASSES


@pytest.mark.parametrize("random_number", [0, HIGHEST])
def test_a_cut_loses_everything_there_and_nothing_else(random_number: int) -> None:
    program = loss_program({NEAR: 0.5, FAR: 1.0})
    assert verdict(program, frame_to(FAR), random_number) == IS_LOST
    assert verdict(program, frame_to(IPv4Address("10.213.7.3")), random_number) == PASSES
    assert verdict(program, frame_to(FAR, ethertype=0x0806), random_number) == PASSES  # ARP


def test_a_loss_is_of_as_many_as_it_says() -> None:
    program = loss_program({FAR: 1.0, NEAR: 0.25})
    assert verdict(program, frame_to(NEAR), int(0.2 * 2**32)) == IS_LOST
    assert verdict(program, frame_to(NEAR), int(0.3 * 2**32)) == PASSES
