"""Where a rank stands: its coordinates in a mesh, who answers for a data-parallel rank, and its place on a node.

Pure functions and frozen dataclasses over integers; standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ostinato.controller.errors import MeshError


@dataclass(frozen=True)
class Coordinates:
    """One rank's place in one mesh.

    Attributes:
        dp_rank: data-parallel rank; ranks that share it receive the same rows.
        dp_size: number of data-parallel ranks.
        answers: whether this rank's result stands for its data-parallel rank; exactly one rank of each does.
        tp_rank: tensor-parallel rank.
        pp_rank: pipeline-parallel rank.
        cp_rank: context-parallel rank.
    """

    dp_rank: int
    dp_size: int
    answers: bool = True
    tp_rank: int = 0
    pp_rank: int = 0
    cp_rank: int = 0

    def __post_init__(self) -> None:
        if self.dp_size < 1 or not 0 <= self.dp_rank < self.dp_size:
            raise MeshError(
                f"Coordinates: expected 0 <= dp_rank < dp_size, got dp_rank {self.dp_rank} of dp_size {self.dp_size}"
            )
        if min(self.tp_rank, self.pp_rank, self.cp_rank) < 0:
            raise MeshError(f"Coordinates: ranks must not be negative, got {self}")


@dataclass(frozen=True)
class Mesh:
    """The coordinates of all ranks of a group in one mesh, in rank order.

    Raises:
        MeshError: the ranks disagree about the size, a data-parallel rank has no answering rank, or more than one.
    """

    coordinates: tuple[Coordinates, ...]

    def __post_init__(self) -> None:
        sizes = sorted({c.dp_size for c in self.coordinates})
        if len(sizes) != 1:
            raise MeshError(f"mesh: every rank must report the same dp_size, got {sizes} from {len(self)} ranks")
        answering: dict[int, int] = {}
        for rank, c in enumerate(self.coordinates):
            if not c.answers:
                continue
            if c.dp_rank in answering:
                raise MeshError(
                    f"mesh: ranks {answering[c.dp_rank]} and {rank} both answer for dp rank {c.dp_rank}; "
                    "set answers=True on one of them"
                )
            answering[c.dp_rank] = rank
        silent = [dp for dp in range(sizes[0]) if dp not in answering]
        if silent:
            raise MeshError(
                f"mesh: no rank answers for dp ranks {silent} of {sizes[0]}; set answers=True on one of each"
            )

    def __len__(self) -> int:
        return len(self.coordinates)

    @staticmethod
    def of_every_rank(world_size: int) -> Mesh:
        """Return the mesh in which every rank is its own data-parallel rank."""
        return Mesh(tuple(Coordinates(rank, world_size) for rank in range(world_size)))

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.coordinates[0].dp_size

    @cached_property
    def answering(self) -> tuple[int, ...]:
        """The answering rank of each data-parallel rank, in data-parallel order."""
        by_dp = {c.dp_rank: rank for rank, c in enumerate(self.coordinates) if c.answers}
        return tuple(by_dp[dp] for dp in range(self.dp_size))


def pipeline_as_data(mesh: Mesh) -> Mesh:
    """Return the mesh in which the stages of a pipeline count as further data-parallel ranks.

    dp_rank' = dp_rank * pp_size + pp_rank. The rank with tp_rank 0 and cp_rank 0 answers for each.
    """
    pp_size = 1 + max(c.pp_rank for c in mesh.coordinates)
    return Mesh(
        tuple(
            replace(
                c,
                dp_rank=c.dp_rank * pp_size + c.pp_rank,
                dp_size=c.dp_size * pp_size,
                answers=c.tp_rank == 0 and c.cp_rank == 0,
            )
            for c in mesh.coordinates
        )
    )


def grid(world_size: int, *, tp: int = 1, cp: int = 1, pp: int = 1) -> tuple[Coordinates, ...]:
    """Lay ranks out in the order tp, cp, dp, pp (tp changes fastest).

    rank = tp_rank + tp * (cp_rank + cp * (dp_rank + dp * pp_rank)). The rank with tp_rank 0 and cp_rank 0 of the last
    pipeline stage answers for its data-parallel rank.

    Args:
        world_size: number of ranks; a multiple of tp * cp * pp.
        tp: tensor-parallel size.
        cp: context-parallel size.
        pp: pipeline-parallel size.

    Returns:
        One `Coordinates` a rank, in rank order.

    Raises:
        MeshError: the sizes do not divide the world.
    """
    if min(world_size, tp, cp, pp) < 1 or world_size % (tp * cp * pp):
        raise MeshError(f"grid: world size {world_size} is not a positive multiple of tp {tp} * cp {cp} * pp {pp}")
    dp = world_size // (tp * cp * pp)
    places = []
    for rank in range(world_size):
        rest, tp_rank = divmod(rank, tp)
        rest, cp_rank = divmod(rest, cp)
        pp_rank, dp_rank = divmod(rest, dp)
        answers = tp_rank == 0 and cp_rank == 0 and pp_rank == pp - 1
        places.append(Coordinates(dp_rank, dp, answers, tp_rank, pp_rank, cp_rank))
    return tuple(places)


@dataclass(frozen=True)
class RankPlace:
    """The rank that a process slot gets, and where it stands on its node."""

    rank: int
    local_rank: int
    local_world_size: int
    node: str


def assign_ranks(nodes: Sequence[str]) -> list[RankPlace]:
    """Give ranks to process slots so that the ranks of one node are contiguous, whatever the nodes' sizes.

    Nodes are ordered by their first slot, slots of a node by their index, so the result depends on the slots' order
    alone and not on when a process came up.

    Args:
        nodes: the node of each slot.

    Returns:
        One `RankPlace` a slot, in slot order.
    """
    slots_of: dict[str, list[int]] = {}
    for slot, node in enumerate(nodes):
        slots_of.setdefault(node, []).append(slot)
    places: dict[int, RankPlace] = {}
    for node, slots in slots_of.items():
        for local_rank, slot in enumerate(slots):
            places[slot] = RankPlace(len(places), local_rank, len(slots), node)
    return [places[slot] for slot in range(len(nodes))]
