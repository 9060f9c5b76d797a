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

    A ROUTER raises EHOSTUNREACH when it sends to one who is gone, and takes only small messages.
    """
    result = zmq.Context().socket(kind)
    result.set_hwm(0)
    result.setsockopt(zmq.IPV6, 1)
    if kind == zmq.ROUTER:
        result.setsockopt(zmq.ROUTER_MANDATORY, 1)
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
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        numeric = address[0]
        bound.bind(f"tcp://[{numeric}]:*" if family == socket.AF_INET6 else f"tcp://{numeric}:*")
    except (OSError, zmq.ZMQError) as error:
        raise ChannelError(
            f"cannot bind a port of {host}: {error}; it must be a name or address of this machine"
        ) from error
    return bound.getsockopt_string(zmq.LAST_ENDPOINT)
