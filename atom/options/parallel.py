"""The options that spread an engine over ranks: processes with one device each."""

from __future__ import annotations

from dataclasses import dataclass

from atom.options.fields import ConfigError, Options, option

BACKENDS = ("mp", "ray")
DEFAULT_MASTER_PORT = 29500


@dataclass(frozen=True)
class ParallelOptions(Options):
    """Who shares the work.

    `tensor_parallel_size` ranks share every layer. `data_parallel_size` such groups serve different
    requests: as replicas of each other, or, with `enable_expert_parallel`, sharing the experts.
    """

    tensor_parallel_size: int = option(
        1, "number of GPUs (on a CPU: processes) that share every layer", short="-tp", at_least=1
    )
    data_parallel_size: int = option(
        1,
        "number of such groups that serve different requests: replicas, or, with "
        "--enable-expert-parallel, groups that share the experts",
        short="-dp",
        at_least=1,
    )
    enable_expert_parallel: bool = option(
        False, "each GPU holds whole experts, instead of a part of every one"
    )
    nnodes: int = option(
        1, "number of machines, each started by hand with its --node-rank", at_least=1
    )
    node_rank: int = option(0, "place of this machine, from 0; the server runs on 0", at_least=0)
    master_addr: str | None = option(
        None, "address of machine 0 that the others reach; 127.0.0.1 for one machine"
    )
    master_port: int | None = option(
        None,
        f"port at which the ranks meet on machine 0; a free one for one machine, else "
        f"{DEFAULT_MASTER_PORT}",
        at_least=1,
    )
    distributed_executor_backend: str = option(
        "mp", "what starts the ranks: this program (mp), or a Ray cluster", choices=BACKENDS
    )
    deterministic_collectives: bool = option(
        False, "sum over the ranks in a fixed order, which is slower"
    )
    num_threads: int | None = option(
        None,
        "CPU threads of each rank; when omitted, as many as other programs leave processors free, "
        "at every time and at most $OMP_NUM_THREADS, or a fixed share of them for each of several "
        "ranks",
        at_least=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nnodes > 1 and self.master_addr is None:
            raise ConfigError("nnodes needs master_addr, the address of machine 0")
        if self.node_rank >= self.nnodes:
            raise ConfigError(f"node_rank={self.node_rank} must be less than nnodes={self.nnodes}")
        if self.num_ranks % self.nnodes:
            raise ConfigError(
                f"{self.num_ranks} ranks do not split evenly over nnodes={self.nnodes}"
            )
        if self.enable_expert_parallel and self.num_ranks == 1:
            raise ConfigError(
                "enable_expert_parallel has no effect on a single rank; raise "
                "tensor_parallel_size or data_parallel_size"
            )
        if self.nnodes > 1 and self.distributed_executor_backend == "ray":
            raise ConfigError("nnodes is for machines started by hand; Ray knows its own")
        if self.couples_engines and self.nnodes > 1:
            raise ConfigError(
                "the engines of data_parallel_size that share experts are on one machine, and "
                f"nnodes is {self.nnodes}"
            )
        if self.couples_engines and self.distributed_executor_backend == "ray":
            raise ConfigError("engines that share experts are started by this program, not by Ray")
        if self.num_ranks == 1:
            self._refuse_for_single_rank()

    def _refuse_for_single_rank(self) -> None:
        given = {
            "deterministic_collectives": self.deterministic_collectives,
            "distributed_executor_backend": self.distributed_executor_backend != "mp",
            "master_addr": self.master_addr is not None,
            "master_port": self.master_port is not None,
        }
        for name, is_given in given.items():
            if is_given:
                raise ConfigError(f"{name} has no effect on a single rank")

    @property
    def num_ranks(self) -> int:
        """Of all groups."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def couples_engines(self) -> bool:
        """Whether several engines share the experts."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def num_replicas(self) -> int:
        """Engines that share nothing; 1 when the groups share the experts."""
        return 1 if self.enable_expert_parallel else self.data_parallel_size
