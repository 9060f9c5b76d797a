"""Places ranks in a Ray cluster: on each node an actor holds its devices and starts its ranks.

The ranks are processes of their own, children of the actors: they end with them. Rank 0 is the
process that asks, on its own node.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from atom.distributed.launch import LocalRanks, RankStartError
from atom.distributed.rank_environment import LOOPBACK, RankEnvironment
from atom.environment import device_variables, set_variables
from atom.options.fields import ConfigError
from atom.options.parallel import ParallelOptions

_PLACEMENT_SECONDS = 120.0
_ACTOR_SECONDS = 120.0
_CLOSE_SECONDS = 10.0
# Enough to ask for the resource that stands for one node.
_A_LITTLE = 0.001


@dataclass(frozen=True)
class NodePlan:
    """How many ranks each node has; rank 0's node is the first."""

    ranks_per_node: int
    num_nodes: int


def plan_nodes(num_ranks: int, own: float, others: Sequence[float]) -> NodePlan:
    """The fewest nodes that have enough devices, the same number on each.

    Args:
        own, others: devices of rank 0's node, and of each other one.

    Raises:
        ConfigError: when there are too few.
    """
    for num_nodes in range(1, len(others) + 2):
        share, rest = divmod(num_ranks, num_nodes)
        if rest == 0 and own >= share and sum(n >= share for n in others) >= num_nodes - 1:
            return NodePlan(share, num_nodes)
    there = ", ".join(f"{n:g}" for n in (own, *others))
    raise ConfigError(
        f"Ray's nodes have {there} devices, the first one being that of rank 0: {num_ranks} ranks "
        f"do not fit, the same number on each node"
    )


class NodeRanks:
    """The ranks of a node; lives in a Ray actor."""

    def __init__(self) -> None:
        self._ranks: LocalRanks | None = None
        self._closing = threading.Event()

    def node(self) -> tuple[str, dict[str, str]]:
        """The node's address, and the variables that say which devices Ray gives."""
        ray = _import_ray()
        return ray.util.get_node_ip_address(), device_variables()

    def start(self, environments: Sequence[RankEnvironment], instructions: bytes) -> None:
        self._ranks = LocalRanks(environments, instructions)

    def wait(self) -> str | None:
        """Wait until a rank has ended that should not; how it did."""
        while self._ranks is not None and not self._closing.wait(0.1):
            try:
                self._ranks.check()
            except RankStartError as error:
                return str(error)
        return None

    def close(self) -> None:
        self._closing.set()
        if self._ranks is not None:
            self._ranks.close()


class RayRanks:
    """Nodes that Ray has given, rank 0's first, and the ranks on them.

    Attributes:
        meeting: where the ranks meet, as rank 0 sees it; the port may be 0.
    """

    def __init__(self, group: Any, actors: Sequence[Any], meeting: RankEnvironment) -> None:
        self._ray = _import_ray()
        self._group = group
        self._actors = actors
        self._ends: list[Any] = []
        self.meeting = meeting

    def start(self, meeting: RankEnvironment, instructions: bytes) -> None:
        """Start all ranks but 0.

        Args:
            meeting: with the port.
        """
        share = meeting.world_size // len(self._actors)
        starts = []
        for node, actor in enumerate(self._actors):
            ranks = [
                replace(meeting, rank=node * share + index, local_rank=index)
                for index in range(share)
                if node + index > 0
            ]
            starts.append(actor.start.remote(ranks, instructions))
        self._ray.get(starts)
        self._ends = [actor.wait.remote() for actor in self._actors]

    def check(self) -> None:
        ended, _ = self._ray.wait(self._ends, timeout=0)
        for end in ended:
            try:
                how = self._ray.get(end)
            except self._ray.exceptions.RayError as error:
                raise RankStartError(f"Ray lost the node of a rank: {error}") from error
            if how is not None:
                raise RankStartError(how)

    def last_words(self, _: int) -> str | None:
        """None: Ray shows what its actors' processes write."""
        return None

    def kill(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)

    def close(self) -> None:
        ending = [actor.close.remote() for actor in self._actors]
        self._ray.wait(ending, num_returns=len(ending), timeout=_CLOSE_SECONDS)
        self.kill()
        self._ray.util.remove_placement_group(self._group)


def place_ranks(parallel: ParallelOptions, device: str) -> RayRanks:
    """Have Ray set devices aside for all ranks: on this node if it has enough, else on several.

    Args:
        device: the option; `auto` means GPUs where this node has any.

    Raises:
        ConfigError: when Ray is not installed or not running, or has too few devices.
    """
    ray = _import_ray()
    if not ray.is_initialized():
        try:
            ray.init(address="auto")
        except ConnectionError as error:
            raise ConfigError(f"no Ray cluster runs here (ray start --head): {error}") from error
    own_id = ray.get_runtime_context().get_node_id()
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    own = nodes.pop(own_id)
    on_gpu = device == "cuda" or (device == "auto" and _devices(own, "GPU") > 0)
    kind = "GPU" if on_gpu else "CPU"
    others = [_devices(node, kind) for node in nodes.values()]
    plan = plan_nodes(parallel.num_ranks, _devices(own, kind), others)
    bundles: list[dict[str, float]] = [{kind: plan.ranks_per_node} for _ in range(plan.num_nodes)]
    bundles[0][f"node:{own['NodeManagerAddress']}"] = _A_LITTLE
    strategy = "STRICT_PACK" if plan.num_nodes == 1 else "STRICT_SPREAD"
    group = ray.util.placement_group(bundles, strategy=strategy)
    try:
        if not group.wait(_PLACEMENT_SECONDS):
            raise ConfigError(
                f"Ray has not set aside {plan.ranks_per_node} {kind} on each of {plan.num_nodes} "
                f"nodes in {_PLACEMENT_SECONDS:g} s: others hold them (ray status)"
            )
        actors = _start_actors(group, plan, kind, own_id)
        address, variables = ray.get(actors[0].node.remote(), timeout=_ACTOR_SECONDS)
        if on_gpu:
            _adopt(variables)
    except BaseException:
        ray.util.remove_placement_group(group)
        raise
    meeting = RankEnvironment(
        rank=0,
        world_size=parallel.num_ranks,
        local_rank=0,
        master_addr=parallel.master_addr or (LOOPBACK if plan.num_nodes == 1 else address),
        master_port=parallel.master_port or 0,
        spans_machines=plan.num_nodes > 1,
    )
    return RayRanks(group, actors, meeting)


def _start_actors(group: Any, plan: NodePlan, kind: str, own_id: str) -> list[Any]:
    """An actor for each bundle, that of this node first."""
    ray = _import_ray()
    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    order = sorted(nodes, key=lambda bundle: (nodes[bundle] != own_id, bundle))
    if nodes[order[0]] != own_id:
        raise ConfigError("Ray has placed no rank on this node, where rank 0 is")
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    devices = {"num_gpus" if kind == "GPU" else "num_cpus": plan.ranks_per_node}
    return [
        ray.remote(NodeRanks)
        .options(
            **{"num_cpus": 0, **devices},
            max_concurrency=4,
            scheduling_strategy=strategy(group, placement_group_bundle_index=bundle),
        )
        .remote()
        for bundle in order
    ]


def _adopt(variables: Mapping[str, str]) -> None:
    """See the devices that Ray gave this node's ranks, rank 0's among them."""
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ConfigError(
            "this process has used a GPU before Ray could give it one; start the engine first"
        )
    set_variables(variables)


def _devices(node: Mapping[str, Any], kind: str) -> float:
    return float(node["Resources"].get(kind, 0))


def _import_ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(
            "--distributed-executor-backend ray needs Ray, which is not installed; run: "
            "pip install 'atom-llm[ray]'"
        ) from error
    return ray
