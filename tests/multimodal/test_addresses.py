from __future__ import annotations

import ipaddress

import pytest

from atom.multimodal.addresses import is_public
from atom.multimodal.policy import MediaPolicy

PUBLIC = ("8.8.8.8", "93.184.216.34", "1.1.1.1", "223.255.255.255", "2606:4700::1111", "2a00::1")
LOCAL = (
    *("0.0.0.0", "10.1.2.3", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.255.254"),
    *(
        "169.254.169.254",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "198.19.0.1",
        "192.0.0.192",
    ),
    *("192.0.2.1", "198.51.100.1", "203.0.113.1", "192.88.99.1", "224.0.1.1", "240.0.0.1"),
    *("255.255.255.255", "168.63.129.16"),
    *("::", "::1", "::ffff:8.8.8.8", "::ffff:127.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1"),
    *("64:ff9b:1::1", "100::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fec0::1", "ff02::1"),
    *("2001::1", "2001:0:7f00:1::", "2001:db8::1", "2002:7f00:1::", "3fff::1", "5f00::1"),
)


def test_which_addresses_are_public() -> None:
    assert [a for a in PUBLIC if not is_public(ipaddress.ip_address(a))] == []
    assert [a for a in LOCAL if is_public(ipaddress.ip_address(a))] == []


@pytest.mark.parametrize(
    "host",
    [
        *(f"[{a}]" if ":" in a else a for a in LOCAL),
        *(
            "2130706433",
            "017700000001",
            "0x7f000001",
            "0x7f.1",
            "127.1",
            "0177.0.0.1",
            "127.0.0.1.",
        ),
        *("localhost", "127.0.0.1:80", "10.0.0.1:8080", "[::1]:80"),
    ],
)
def test_local_addresses_cannot_be_allowed(host: str) -> None:
    with pytest.raises(ValueError, match="address of a local network"):
        MediaPolicy(allowed_hosts=(host,))


@pytest.mark.parametrize(
    "host", ["", "https://a.com", "a.com/b", "a.com:", "a.com:0", "a.com:70000", "u@a.com", "*"]
)
def test_hosts_are_names(host: str) -> None:
    with pytest.raises(ValueError, match="expected hosts as NAME or NAME:PORT"):
        MediaPolicy(allowed_hosts=(host,))


def test_names_and_public_addresses_can_be_allowed() -> None:
    policy = MediaPolicy(allowed_hosts=("Images.example", "a.b:8443", "8.8.8.8", "[2606:4700::1]"))
    assert policy.allowed_hosts == ("images.example", "a.b:8443", "8.8.8.8", "[2606:4700::1]")
