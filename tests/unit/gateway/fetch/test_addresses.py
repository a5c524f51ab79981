"""Which addresses may be connected to: public ones alone, in whatever form they are written."""

from ipaddress import IPv6Address, ip_address, ip_network

import pytest

from triptych_gateway.fetch.fetch_rules import AddressRules

RULES = AddressRules()

PRIVATE_V4 = {
    "this network": ["0.0.0.0", "0.1.2.3"],
    "private": ["10.0.0.1", "10.255.255.255", "172.16.0.1", "172.31.255.255", "192.168.0.1"],
    "carriers' NAT": ["100.64.0.1", "100.127.255.255", "100.100.100.200"],
    "loopback": ["127.0.0.1", "127.0.0.2", "127.255.255.255"],
    "link-local, metadata": ["169.254.0.1", "169.254.169.254", "169.254.170.2"],
    "metadata elsewhere": ["168.63.129.16", "192.0.0.192"],
    "assignments": ["192.0.0.1", "192.0.0.170"],
    "documentation": ["192.0.2.1", "198.51.100.1", "203.0.113.1"],
    "6to4 relays": ["192.88.99.1"],
    "benchmarks": ["198.18.0.1", "198.19.255.255"],
    "multicast": ["224.0.0.1", "239.255.255.255", "233.252.0.1"],
    "reserved": ["240.0.0.1", "255.255.255.254"],
    "broadcast": ["255.255.255.255"],
}
PRIVATE_V6 = {
    "unspecified": ["::"],
    "loopback": ["::1"],
    "compatible": ["::127.0.0.1", "::8.8.8.8"],
    "mapped": ["::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254"],
    "translated": ["::ffff:0:8.8.8.8"],
    "NAT64": ["64:ff9b::127.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b::169.254.169.254"],
    "NAT64 of a local prefix": ["64:ff9b:1::8.8.8.8", "64:ff9b:1:ffff::1"],
    "discard": ["100::1"],
    "Teredo": ["2001::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2"],
    "benchmarks": ["2001:2::1"],
    "ORCHID": ["2001:10::1", "2001:20::1"],
    "documentation": ["2001:db8::1", "3fff::1"],
    "6to4": ["2002:7f00:1::1", "2002:808:808::1"],
    "segment routing": ["5f00::1"],
    "unique-local, metadata": ["fc00::1", "fd00:ec2::254"],
    "link-local": ["fe80::1", "fe80::5efe:8.8.8.8"],
    "site-local": ["fec0::1"],
    "ISATAP": ["2a00:1450::5efe:8.8.8.8", "2a00:1450::200:5efe:10.0.0.1"],
    "multicast": ["ff02::1", "ff0e::1"],
    "not given out": ["4000::1", "e000::1"],
}
REFUSED = [each for group in (PRIVATE_V4, PRIVATE_V6) for addresses in group.values() for each in addresses]
PUBLIC = [
    *("8.8.8.8", "1.1.1.1", "100.63.255.255", "100.128.0.1", "172.15.255.255", "172.32.0.1", "9.255.255.255"),
    *("11.0.0.1", "126.255.255.255", "128.0.0.1", "169.253.0.1", "192.167.0.1", "223.255.255.255"),
    *("2606:4700::1111", "2a00:1450:4001:801::200e", "2001:4860:4860::8888", "::ffff:8.8.8.8"),
    *("64:ff9b::8.8.8.8",),
]


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text: str) -> None:
    assert not RULES.allows(ip_address(text))
    assert not RULES.allows_text(text)


@pytest.mark.parametrize("text", PUBLIC)
def test_public(text: str) -> None:
    assert RULES.allows(ip_address(text))


@pytest.mark.parametrize("text", [each for each in REFUSED if "." in each and ":" not in each])
def test_no_ipv6_form_hides_an_ipv4_address(text: str) -> None:
    low, high = int(ip_address(text)), 0x2A00_1450 << 96
    forms = {
        "mapped": (0xFFFF << 32) | low,
        "compatible": low,
        "NAT64": (0x64FF9B << 96) | low,
        "6to4": (0x2002 << 112) | (low << 80) | 1,
        "Teredo": (0x2001_0000 << 96) | (low ^ 0xFFFF_FFFF),
        "ISATAP": high | (0x5EFE << 32) | low,
    }
    allowed = [name for name, form in forms.items() if RULES.allows(IPv6Address(form))]
    assert not allowed


@pytest.mark.parametrize(
    "text", ["", "example.org", "127.1", "2130706433", "0x7f.0.0.1", "fe80::1%lo", "::1%1"]
)
def test_what_is_no_plain_address_is_refused(text: str) -> None:
    assert not RULES.allows_text(text)


def test_an_operator_may_allow_networks() -> None:
    rules = AddressRules((ip_network("10.1.0.0/16"), ip_network("fd00:1::/32")))
    allowed = ["10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::10.1.2.3", "fd00:1::7", "8.8.8.8"]
    refused = ["10.2.0.1", "::ffff:10.2.0.1", "fd00:2::1", "127.0.0.1", "2002:a01:203::1"]
    assert [each for each in allowed if not rules.allows(ip_address(each))] == []
    assert [each for each in refused if rules.allows(ip_address(each))] == []
