"""Which packets that leave a host are lost: a program for the kernel's packet filter, as `tc` takes it.

Classic BPF, whose instructions are `code jump-if-true jump-if-false operand` (linux/filter.h). It works with
every kernel that can filter; `netem`, which loses packets too, is missing from many.
"""

from collections.abc import Mapping
from ipaddress import IPv4Address

Instruction = tuple[int, int, int, int]

_LOAD_HALF, _LOAD_WORD = 0x28, 0x20  # BPF_LD | BPF_ABS, of 16 and of 32 bits
_IF_EQUAL, _IF_GREATER = 0x15, 0x25  # BPF_JMP | BPF_JEQ, BPF_JMP | BPF_JGT
_RETURN = 0x06
_TYPE_AT, _IPV4, _DESTINATION_AT = 12, 0x0800, 30  # in an Ethernet frame
_RANDOM = 0xFFFFF000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM: another number each time it is loaded
_PASS: Instruction = (_RETURN, 0, 0, 0)  # TC_ACT_OK
_DROP: Instruction = (_RETURN, 0, 0, 2)  # TC_ACT_SHOT


def loss_program(losses: Mapping[IPv4Address, float]) -> str:
    """The bytecode.

    Args:
        losses: probability by destination, 0 to 1.
    """
    program: list[Instruction] = [(_LOAD_HALF, 0, 0, _TYPE_AT), (_IF_EQUAL, 1, 0, _IPV4), _PASS]
    for destination, probability in losses.items():
        program += [
            (_LOAD_WORD, 0, 0, _DESTINATION_AT),
            (_IF_EQUAL, 0, 4, int(destination)),  # else to the next destination
            (_LOAD_WORD, 0, 0, _RANDOM),
            (_IF_GREATER, 0, 1, _threshold(probability)),
            _PASS,
            _DROP,
        ]
    program.append(_PASS)
    return ",".join([str(len(program)), *(" ".join(map(str, each)) for each in program)])


def _threshold(probability: float) -> int:
    """A random number above it passes."""
    if probability >= 1:
        return 2**32 - 1
    return int(probability * 2**32)
