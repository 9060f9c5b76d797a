"""ZMQ sockets between machines."""

from __future__ import annotations

import socket
import threading

import zmq

from atom.distributed.channel import ChannelError

_MOST_BYTES_TO_ROUTER = 1 << 20
_TERM_SECONDS = 0.5


def create_socket(kind: int) -> zmq.Socket[bytes]:
    """A socket with a context of its own; it never drops a message for lack of room.

    A ROUTER raises EHOSTUNREACH when it sends to one who is gone. It and an XPUB take only small
    messages.
    """
    result = zmq.Context().socket(kind)
    result.set_hwm(0)
    result.setsockopt(zmq.IPV6, 1)
    if kind == zmq.ROUTER:
        result.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if kind in (zmq.ROUTER, zmq.XPUB):
        result.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES_TO_ROUTER)
    return result


def close_socket(closed: zmq.Socket[bytes], linger_ms: int) -> None:
    """Close a socket and its context; waits `linger_ms` at most for messages still to be sent.

    Ending a context may take forever in libzmq 4.3, whatever the linger, when its socket sent to a
    peer that was just leaving. Then a sleeping thread is left to it.
    """
    context = closed.context
    closed.close(linger=linger_ms)
    ending = threading.Thread(target=context.term, name="zmq-term", daemon=True)
    ending.start()
    ending.join(linger_ms / 1000 + _TERM_SECONDS)


def bind_tcp(bound: zmq.Socket[bytes], host: str) -> str:
    """Bind a port that the kernel chooses; returns the endpoint that others connect to.

    Args:
        host: a name or address of this machine.

    Raises:
        ChannelError: when there is no such host, or it is another machine.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _cannot_bind(host, error) from error
    # A name may have an IPv6 address that this machine does not use.
    for family, _, _, _, address in found:
        numeric = f"[{address[0]}]" if family == socket.AF_INET6 else address[0]
        try:
            bound.bind(f"tcp://{numeric}:*")
        except zmq.ZMQError as error:
            failure = error
        else:
            return bound.getsockopt_string(zmq.LAST_ENDPOINT)
    raise _cannot_bind(host, failure)


def _cannot_bind(host: str, error: Exception) -> ChannelError:
    return ChannelError(
        f"cannot bind a port of {host}: {error}; it must be a name or address of this machine"
    )
