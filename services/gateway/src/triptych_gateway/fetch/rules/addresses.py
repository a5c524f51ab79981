"""IP addresses that may be connected to: the public Internet's, and networks that an operator allows.

Everything in IANA's registries of special addresses is refused, with what clouds serve their machines from
public space. An IPv6 address that carries an IPv4 address counts as that one (mapped, NAT64), or is refused
where it could lead anywhere (6to4, Teredo, ISATAP, NAT64 of a local prefix, IPv4-compatible).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_REFUSED_V4 = tuple(
    IPv4Network(each)
    for each in (
        "0.0.0.0/8",  # this network; 0.0.0.0 reaches this host
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carriers' NAT; metadata of Alibaba Cloud
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # Azure's own services, for its machines alone
        "169.254.0.0/16",  # link-local; metadata of most clouds
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments; metadata of Oracle's cloud
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved; broadcast
    )
)
_GLOBAL_V6 = IPv6Network("2000::/3")  # all that IANA has given out for global unicast
_REFUSED_V6 = tuple(
    IPv6Network(each)
    for each in (
        "2001::/23",  # protocol assignments: Teredo, benchmarks, ORCHID
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4
        "3fff::/20",  # documentation
    )
)
_MAPPED = IPv6Network("::ffff:0:0/96")
_NAT64 = IPv6Network("64:ff9b::/96")
_ISATAP = frozenset({0x0000_5EFE, 0x0200_5EFE})  # the upper half of an interface's identifier


@dataclass(frozen=True, slots=True)
class AddressRules:
    """Address rules of one gateway; the networks in `allowed` are exempt from all others."""

    allowed: Sequence[Network] = ()

    def allows(self, address: Address) -> bool:
        """Return whether a connection to `address` may be made."""
        meant = meant_address(address)
        if any(address in network or meant in network for network in self.allowed):
            return True
        if isinstance(meant, IPv4Address):
            is_refused = any(meant in network for network in _REFUSED_V4)
        else:
            is_refused = meant not in _GLOBAL_V6 or any(meant in network for network in _REFUSED_V6)
            is_refused |= (int(meant) >> 32) & 0xFFFF_FFFF in _ISATAP
        # The standard library's opinion counts too: the tables are not of the same age.
        return not is_refused and meant.is_global and not meant.is_multicast

    def allows_text(self, text: str) -> bool:
        """Return the same for a socket's address text, perhaps with a zone. Other text is refused."""
        try:
            return self.allows(ip_address(text.partition("%")[0]))
        except ValueError:
            return False


def meant_address(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address carries; else the address itself."""
    if isinstance(address, IPv6Address) and (address in _MAPPED or address in _NAT64):
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address
