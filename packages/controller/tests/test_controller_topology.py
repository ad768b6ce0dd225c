"""Coordinates, meshes and the ranks that process slots get."""

from __future__ import annotations

import pickle

import pytest

from ostinato.controller.errors import MeshError
from ostinato.controller.topology import Coordinates, Mesh, assign_ranks, grid, pipeline_as_data


def test_coordinates_outside_their_size_are_refused():
    for dp_rank, dp_size in ((-1, 2), (2, 2), (0, 0)):
        with pytest.raises(MeshError, match="dp_rank"):
            Coordinates(dp_rank, dp_size)


def test_coordinates_survive_pickling():
    assert pickle.loads(pickle.dumps(Coordinates(1, 2, False, 3, 4, 5))) == Coordinates(1, 2, False, 3, 4, 5)


def test_grid_counts_tensor_ranks_fastest_and_pipeline_ranks_slowest():
    got = [(c.tp_rank, c.cp_rank, c.dp_rank, c.pp_rank, c.answers) for c in grid(8, tp=2, pp=2)]
    assert got == [
        (0, 0, 0, 0, False),
        (1, 0, 0, 0, False),
        (0, 0, 1, 0, False),
        (1, 0, 1, 0, False),
        (0, 0, 0, 1, True),
        (1, 0, 0, 1, False),
        (0, 0, 1, 1, True),
        (1, 0, 1, 1, False),
    ]


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"tp": 2, "cp": 2, "pp": 2}])
def test_grid_gives_every_dp_rank_one_answering_rank(sizes):
    mesh = Mesh(grid(8, **sizes))
    assert [mesh.coordinates[rank].dp_rank for rank in mesh.answering] == list(range(mesh.dp_size))


def test_grid_that_does_not_divide_is_refused():
    with pytest.raises(MeshError, match=r"world size 6.*tp 4"):
        grid(6, tp=4)


def test_mesh_without_an_answering_rank_is_refused():
    with pytest.raises(MeshError, match=r"no rank answers for dp ranks \[1\]"):
        Mesh((Coordinates(0, 2), Coordinates(1, 2, answers=False)))


def test_mesh_with_two_answering_ranks_is_refused():
    with pytest.raises(MeshError, match="ranks 0 and 1 both answer"):
        Mesh((Coordinates(0, 1), Coordinates(0, 1)))


def test_mesh_whose_ranks_disagree_is_refused():
    with pytest.raises(MeshError, match=r"\[1, 2\]"):
        Mesh((Coordinates(0, 1), Coordinates(0, 2)))


def test_pipeline_as_data_numbers_stages_within_a_data_parallel_rank():
    mesh = pipeline_as_data(Mesh(grid(8, tp=2, pp=2)))
    assert mesh.dp_size == 4
    assert [c.dp_rank for c in mesh.coordinates] == [0, 0, 2, 2, 1, 1, 3, 3]
    assert mesh.answering == (0, 4, 2, 6)


@pytest.mark.parametrize(
    ("nodes", "ranks", "local_ranks", "local_sizes"),
    [
        ("AABBBB", [0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 3], [2, 2, 4, 4, 4, 4]),
        ("BBBBAA", [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 0, 1], [4, 4, 4, 4, 2, 2]),
        ("ABA", [0, 2, 1], [0, 0, 1], [2, 1, 2]),
        ("A", [0], [0], [1]),
        ("ABC", [0, 1, 2], [0, 0, 0], [1, 1, 1]),
    ],
)
def test_assign_ranks_counts_every_node_by_itself(nodes, ranks, local_ranks, local_sizes):
    """H-09: local world size is the node's own, and the ranks of a node are contiguous."""
    places = assign_ranks(list(nodes))
    assert [place.rank for place in places] == ranks
    assert [place.local_rank for place in places] == local_ranks
    assert [place.local_world_size for place in places] == local_sizes
    assert [place.node for place in places] == list(nodes)
