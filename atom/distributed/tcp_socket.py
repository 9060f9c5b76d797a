"""ZMQ sockets between machines."""

from __future__ import annotations

import socket

import zmq

from atom.distributed.channel import ChannelError


def create_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket that never drops a message for lack of room; IPv4 and IPv6."""
    result = context.socket(kind)
    result.set_hwm(0)
    result.setsockopt(zmq.IPV6, 1)
    return result


def bind_tcp(bound: zmq.Socket[bytes], host: str) -> str:
    """Bind a port that the kernel chooses; returns the endpoint that others connect to.

    Args:
        host: a name or address of this machine.

    Raises:
        ChannelError: when there is no such host, or it is another machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        numeric = address[0]
        bound.bind(f"tcp://[{numeric}]:*" if family == socket.AF_INET6 else f"tcp://{numeric}:*")
    except (OSError, zmq.ZMQError) as error:
        raise ChannelError(
            f"cannot bind a port of {host}: {error}; it must be a name or address of this machine"
        ) from error
    return bound.getsockopt_string(zmq.LAST_ENDPOINT)
