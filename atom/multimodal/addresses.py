"""Which addresses are of the public internet.

Source: IANA's registries of special-purpose addresses. Listed here because what `ipaddress`
calls global differs between versions of Python.
"""

from __future__ import annotations

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NOT_PUBLIC_4 = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",  # carriers' own, and metadata of some clouds
        "127.0.0.0/8",
        "168.63.129.16/32",  # a cloud's own service, at an address that looks public
        "169.254.0.0/16",  # link-local, and metadata of most clouds
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
# The only global unicast there is; IPv4 within IPv6 (mapped, compatible, NAT64), unique local,
# link-local, site-local and multicast addresses all lie outside.
_GLOBAL_6 = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC_6 = tuple(
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # protocols' own, Teredo among them
        "2001:db8::/32",
        "2002::/16",  # 6to4: an IPv4 address in disguise
        "3fff::/20",
    )
)


def is_public(address: Address) -> bool:
    """Whether an address is one machine of the public internet."""
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_4)
    return address in _GLOBAL_6 and not any(address in network for network in _NOT_PUBLIC_6)


def local_literal(host: str) -> bool:
    """Whether a host is spelled as an address, of any form, that is not public.

    Numbers in other forms than `ipaddress` takes (octal, hexadecimal, fewer parts) are refused as
    well: what they mean depends on who reads them.
    """
    try:
        return not is_public(ipaddress.ip_address(host))
    except ValueError:
        # A name's last label is never a number (RFC 3696); a trailing dot changes nothing.
        last = host.rstrip(".").rpartition(".")[2]
        return last.isdigit() or last.startswith("0x") or host == "localhost"
