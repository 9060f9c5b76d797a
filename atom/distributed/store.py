"""The store at which ranks meet: names and bytes, on rank 0's machine."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from atom.distributed.launch import RankStartError
from atom.distributed.rank_environment import RankEnvironment, is_loopback
from atom.options.fields import ConfigError

# Of one exchange with the store, which answers at once or is gone.
_ANSWER = timedelta(seconds=60)
_BACKLOG = 2048
_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.2
_CONNECT_SECONDS = 5.0
_NAME_SECONDS = 30.0


def listen(environment: RankEnvironment) -> socket.socket:
    """Rank 0's socket for its store, on the address that the other ranks were told and no other.

    Raises:
        ConfigError: when that is no address of this machine, or the port is taken.
    """
    family, kind, protocol, _, address = _address_to_bind(environment)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(_why_not_bound(environment, error)) from error
    return listener


def _address_to_bind(environment: RankEnvironment) -> tuple[Any, ...]:
    host = environment.master_addr
    # A cluster's name service may learn late that this machine is there.
    end = time.monotonic() + (_NAME_SECONDS if environment.spans_machines else 0)
    while True:
        try:
            found = _resolve(host, environment.master_port, socket.SOCK_STREAM)
            break
        except OSError as error:
            if time.monotonic() > end:
                why = f"MASTER_ADDR (--master-addr) {host} is unknown: {error}"
                raise ConfigError(why) from error
        time.sleep(_LONGEST_PAUSE_SECONDS)
    address = str(found[4][0])
    if environment.spans_machines and is_loopback(address) and not is_loopback(host):
        raise ConfigError(
            f"MASTER_ADDR (--master-addr) {host} is {address} on this machine, which others cannot "
            f"reach; give its address in the network"
        )
    return found


def _why_not_bound(environment: RankEnvironment, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {environment.master_port} of {environment.master_addr}, where the ranks were to "
            f"meet, is in use, perhaps by another engine; give another one with --master-port, or "
            f"as MASTER_PORT to whatever starts the ranks"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"MASTER_ADDR (--master-addr) {environment.master_addr} is no address of this machine, "
            f"where rank 0 runs"
        )
    return f"the ranks cannot meet at {environment.address}: {error}"


def host_store(listener: socket.socket) -> TCPStore:
    """The store of rank 0, which lives as long as anything here holds it."""
    host, port = listener.getsockname()[:2]
    return TCPStore(
        host,
        port,
        None,
        is_master=True,
        timeout=_ANSWER,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def reach_store(environment: RankEnvironment, timeout_s: float) -> TCPStore:
    """The store of rank 0 or of the launcher, as soon as it is there.

    Raises:
        RankStartError: when it is not there in time.
    """
    address = (environment.master_addr, environment.master_port)
    end = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(address, _CONNECT_SECONDS).close()
            return TCPStore(*address, None, timeout=_ANSWER, wait_for_workers=False)
        except (OSError, DistError) as error:
            if time.monotonic() > end:
                raise RankStartError(
                    f"rank {environment.rank} does not reach rank 0 at {environment.address} in "
                    f"{timeout_s:g} s: {error}"
                ) from error
        time.sleep(_LONGEST_PAUSE_SECONDS)


def scope(store: Store, environment: RankEnvironment) -> Store:
    """The part of a store that is this engine's: the launcher's lives through restarts."""
    return PrefixStore(f"atom/{environment.attempt}", store)


def await_key(
    store: Store, key: str, end: float, check: Callable[[], None] = lambda: None
) -> bytes:
    """The value of a key, once it is set.

    Args:
        end: when to give up, on the clock of `time.monotonic`.
        check: called again and again; raises when there is no point in waiting.

    Raises:
        RankStartError: when it is not set in time, or the store has gone.
    """
    pause = _FIRST_PAUSE_SECONDS
    try:
        while not store.check([key]):
            if time.monotonic() > end:
                raise RankStartError(f"rank 0 did not say {key} in time; does it run?")
            check()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return bytes(store.get(key))
    except DistError as error:
        raise RankStartError(f"rank 0 has ended before the engine started: {error}") from error


def own_address(environment: RankEnvironment) -> str:
    """This machine's address on the way to rank 0, for its own sockets."""
    target = (environment.master_addr, environment.master_port)
    family, kind, protocol, _, address = _resolve(*target, socket.SOCK_DGRAM)
    with socket.socket(family, kind, protocol) as probe:  # nothing is sent
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface that has this address of this machine; None if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address.partition("%")[0] for each in addresses):
            return str(name).partition(":")[0]
    return None


def _resolve(host: str, port: int, kind: socket.SocketKind) -> tuple[Any, ...]:
    """The first answer of `getaddrinfo`, of IPv4 if there is one: every rank must choose alike."""
    found = socket.getaddrinfo(host, port, type=kind)
    return min(found, key=lambda each: each[0] != socket.AF_INET)
