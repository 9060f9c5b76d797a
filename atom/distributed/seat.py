"""An engine's place among those that share the experts, and where their ranks meet.

Each of these engines starts and watches its own ranks; whoever starts the engines gives them seats.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace

import torch

from atom.distributed.groups import ProcessGroups
from atom.distributed.parallel_state import SINGLE
from atom.distributed.place import Place
from atom.distributed.rank_environment import LOOPBACK, RankEnvironment
from atom.distributed.store import Store, host_store, listen, reach_store

_MEETING_SECONDS = 600.0


@dataclass(frozen=True)
class Seat:
    """Attributes:
    index, number: which engine this is, of how many.
    port: where engine 0 has the store at which all their ranks meet, on this machine.
    """

    index: int
    number: int
    port: int

    def variables(self) -> dict[str, str]:
        """The environment of the engine's processes."""
        return {"ATOM_ENGINE_SEAT": f"{self.index}/{self.number}/{self.port}"}

    @classmethod
    def taken(cls, text: str | None) -> Seat | None:
        """The seat that `variables` describes; None if there is none."""
        return None if text is None else cls(*map(int, text.split("/")))

    def open_store(self, rank: int) -> Store:
        """The store, for a rank of this engine.

        Raises:
            RankStartError: when engine 0 does not come.
        """
        meeting = RankEnvironment(self.index, self.number, 0, LOOPBACK, self.port)
        if self.index == rank == 0:
            return host_store(listen(meeting))
        return reach_store(meeting, _MEETING_SECONDS)

    def join(self, place: Place, groups: ProcessGroups, device: torch.device) -> Place:
        """The place of one of the engine's ranks, among the ranks of all engines."""
        rank, size = place.tensor.rank, place.tensor.size
        name, first = "experts", self.index * size
        experts = groups.of_device_tensors(name, first + rank, self.number * size, device)
        engines = SINGLE
        if place.is_first:
            engines = groups.of_host_tensors("engines", self.index, self.number)
        return replace(place, experts=experts, engines=engines)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
