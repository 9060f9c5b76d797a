"""Which rank this process is, and where the ranks meet."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from atom.options.fields import ConfigError
from atom.options.parallel import DEFAULT_MASTER_PORT

LOOPBACK = "127.0.0.1"
# Slurm's names for what other launchers call otherwise.
_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}


@dataclass(frozen=True)
class RankEnvironment:
    """Attributes:
    local_rank: index of the device among those of this machine.
    master_addr, master_port: where rank 0 has its store, or the launcher has one.
    spans_machines: whether ranks are known to run elsewhere.
    store_is_launchers: the store is there already, as torchrun's is.
    attempt: how often the launcher has restarted the ranks.
    """

    rank: int
    world_size: int
    local_rank: int
    master_addr: str = LOOPBACK
    master_port: int = 0
    spans_machines: bool = False
    store_is_launchers: bool = False
    attempt: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"RANK={self.rank} must be less than WORLD_SIZE={self.world_size}")

    @property
    def address(self) -> str:
        return f"{self.master_addr}:{self.master_port}"

    def variables(self) -> dict[str, str]:
        """The environment of a process that is this rank."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.store_is_launchers),
            "TORCHELASTIC_RESTART_COUNT": str(self.attempt),
            # Those of a launcher that started this process do not hold for its children.
            "LOCAL_WORLD_SIZE": "",
        }


def launched_rank(variables: Mapping[str, str]) -> RankEnvironment | None:
    """What a launcher set: torchrun, whoever sets the same variables, or Slurm.

    Slurm counts where a job has several tasks and `MASTER_ADDR` is set: it sets its own variables
    also for programs that are on their own.

    Args:
        variables: see `environment.rank_variables`.

    Returns:
        None when nobody launched this process as one of several ranks.

    Raises:
        ConfigError: naming the variable that is missing or wrong.
    """
    given = dict(variables)
    if "RANK" not in given and "MASTER_ADDR" in given and given.get("SLURM_NTASKS", "1") != "1":
        given |= {name: given[theirs] for name, theirs in _SLURM.items() if theirs in given}
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return None
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    if missing := [name for name in needed if name not in given]:
        there = ", ".join(f"{name}={given[name]}" for name in needed if name in given)
        raise ConfigError(
            f"{there} in the environment say that a launcher started this process as one of "
            f"several ranks, but {', '.join(missing)} is not set"
        )
    world_size = _number(given, "WORLD_SIZE")
    return RankEnvironment(
        rank=_number(given, "RANK"),
        world_size=world_size,
        local_rank=_number(given, "LOCAL_RANK"),
        master_addr=given["MASTER_ADDR"],
        master_port=_number(given, "MASTER_PORT", DEFAULT_MASTER_PORT),
        spans_machines=(
            _number(given, "LOCAL_WORLD_SIZE") < world_size
            if "LOCAL_WORLD_SIZE" in given
            else _number(given, "SLURM_NNODES", 1) > 1
        ),
        store_is_launchers=given.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(given, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def _number(given: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = given.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise ConfigError(f"{name} in the environment should be a number from 0, got {text!r}")
    return int(text)


def is_loopback(address: str) -> bool:
    """Whether an address or name is this machine to itself, and nothing to others."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
