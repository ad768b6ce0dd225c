"""Statistics of groups named by labels: segment sums, never a stride and never a loop over groups."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ostinato.algos._checks import check_rows, check_same_shape, check_token_floats
from ostinato.algos._typing import Labels, RowIndex
from ostinato.algos.blocks import row_totals
from ostinato.algos.errors import ArgumentError, SingletonGroupWarning


def _as_list(labels: Any) -> list[Hashable]:
    # An element of a tensor hashes by identity, so a tensor's rows would all be groups of their own.
    return labels.tolist() if hasattr(labels, "tolist") else list(labels)


def _number(labels: list[Hashable]) -> tuple[list[int], int]:
    try:
        order = {label: position for position, label in enumerate(dict.fromkeys(labels))}
    except TypeError as error:
        raise ArgumentError(f"group labels must be hashable: {error}; use strings or numbers") from error
    return list(map(order.__getitem__, labels)), len(order)


def group_index(labels: Labels) -> RowIndex:
    """Number the groups in the order in which their labels first appear.

    Args:
        labels: (B) hashable labels, in any order, of groups of any sizes.

    Returns:
        (B,) int64 on the CPU; equal labels have equal numbers, 0 … number of groups − 1.

    Raises:
        ArgumentError: a label is not hashable.
    """
    return torch.tensor(_number(_as_list(labels))[0], dtype=torch.int64)


@dataclass(frozen=True)
class Groups:
    """Rows sorted into rollouts, and rollouts into groups.

    One rollout may have come back as several rows; statistics count it once. Rows without a valid token belong to no
    statistic. Scores are float64.

    Attributes:
        group: (B,) int64, the group of each row.
        unit: (B,) int64, the rollout of each row; each row its own where no rollouts are named.
        unit_group: (U,) int64, the group of each rollout.
        num_groups: how many groups there are.
        valid: (B, R) bool, the policy tokens.
        lengths: (B,) float64, valid tokens of each row.
    """

    group: Tensor
    unit: Tensor
    unit_group: Tensor
    num_groups: int
    valid: Tensor
    lengths: Tensor

    @property
    def row_valid(self) -> Tensor:
        """(B,) bool: the row has a valid token."""
        return self.lengths > 0

    @property
    def num_units(self) -> int:
        """How many rollouts there are."""
        return self.unit_group.shape[0]

    def _scatter(self, values: Tensor, index: Tensor, size: int) -> Tensor:
        return values.new_zeros(size).index_add(0, index, values)

    def unit_mean(self, values: Tensor) -> Tensor:
        """(B,) row values -> (U,) means over each rollout's valid rows; 0 where it has none."""
        kept = torch.where(self.row_valid, values, values.new_zeros(()))
        return self._scatter(kept, self.unit, self.num_units) / self.rows_in_unit.clamp(min=1)

    @property
    def rows_in_unit(self) -> Tensor:
        """(U,) float64: how many valid rows each rollout has."""
        return self._scatter(self.row_valid.to(torch.float64), self.unit, self.num_units)

    @property
    def unit_valid(self) -> Tensor:
        """(U,) bool: the rollout has a valid row."""
        return self.rows_in_unit > 0

    @property
    def size(self) -> Tensor:
        """(G,) float64: how many rollouts with a valid token each group has."""
        return self._scatter(self.unit_valid.to(torch.float64), self.unit_group, self.num_groups)

    @property
    def counted(self) -> Tensor:
        """(B,) bool: the row is valid and its group has at least two rollouts."""
        return self.row_valid & (self.size >= 2)[self.group]

    def group_sum(self, unit_values: Tensor) -> Tensor:
        """(U,) rollout values -> (G,) sums over the valid ones."""
        kept = torch.where(self.unit_valid, unit_values, unit_values.new_zeros(()))
        return self._scatter(kept, self.unit_group, self.num_groups)

    def row_group_sum(self, values: Tensor) -> Tensor:
        """(B,) row values -> (G,) sums over the valid rows."""
        kept = torch.where(self.row_valid, values, values.new_zeros(()))
        return self._scatter(kept, self.group, self.num_groups)

    def group_max(self, unit_values: Tensor, among: Tensor | None = None) -> Tensor:
        """(U,) rollout values -> (G,) maxima over the valid ones (and `among`); −inf where there is none."""
        allowed = self.unit_valid if among is None else self.unit_valid & among
        low = unit_values.new_full((), -torch.inf)
        kept = torch.where(allowed, unit_values, low)
        return low.repeat(self.num_groups).scatter_reduce(0, self.unit_group, kept, "amax")

    def centre(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take each group's mean away, exactly.

        The mean is taken of the distances from the group's own maximum: equal values give distances of exactly 0, so
        a flat group is exactly 0 in every dtype, where Σx/n − x would leave a rounding error for the division by the
        standard deviation to blow up.

        Args:
            values: (B,) float64 scores of the rows.

        Returns:
            (B,) row value − mean of its group, and (G,) the group means of the rollouts.
        """
        low = values.new_full((), -torch.inf)
        kept = torch.where(self.row_valid, values, low)
        top = low.repeat(self.num_groups).scatter_reduce(0, self.group, kept, "amax")
        top = torch.where(self.size > 0, top, top.new_zeros(()))
        distance = torch.where(self.row_valid, values, values.new_zeros(())) - top[self.group]
        mean_distance = self.group_sum(self.unit_mean(distance)) / self.size.clamp(min=1)
        return distance - mean_distance[self.group], top + mean_distance

    def second_largest(self, unit_values: Tensor) -> tuple[Tensor, Tensor]:
        """(U,) rollout values -> (G,) largest and second largest; −inf where a group has no second."""
        largest = self.group_max(unit_values)
        is_largest = unit_values == largest[self.unit_group]
        ties = self.group_sum(is_largest.to(torch.float64))
        runner_up = self.group_max(unit_values, among=~is_largest)
        return largest, torch.where(ties >= 2, largest, runner_up)

    def std(self, centred: Tensor) -> Tensor:
        """(B,) centred row values -> (G,) sample standard deviation (ddof 1) of the rollouts; 0 below two."""
        squares = self.group_sum(self.unit_mean(centred).square())
        return torch.sqrt(squares / (self.size - 1).clamp(min=1))


def scored_groups(
    where: str, rewards: Tensor, response_mask: Tensor, groups: Labels, rollouts: Labels | None
) -> tuple[Tensor, Groups]:
    """Sum each row's rewards over its policy tokens, and sort the rows by their labels.

    Args:
        where: the caller's name, for error texts.
        rewards: (B, R) token-level rewards; masked entries may hold anything.
        response_mask: (B, R).
        groups: see `make_groups`.
        rollouts: see `make_groups`.

    Returns:
        (B,) float64 scores, and the groups.

    Raises:
        ShapeError: the shapes or the number of labels differ.
        ArgumentError: a label is not hashable.
    """
    check_token_floats(where, "token_level_rewards", rewards)
    check_same_shape(where, token_level_rewards=rewards, response_mask=response_mask)
    scores, lengths, valid = row_totals(rewards, response_mask)
    return scores, make_groups(where, groups, rollouts, valid, lengths)


def make_groups(where: str, groups: Labels, rollouts: Labels | None, valid: Tensor, lengths: Tensor) -> Groups:
    """Sort the rows of a batch by their labels.

    Args:
        where: the caller's name, for error texts.
        groups: (B) hashable labels: rows with the same label answered the same prompt.
        rollouts: (B) hashable labels within a group: rows with the same pair are one rollout. None: each row is one.
        valid: (B, R) bool, the policy tokens.
        lengths: (B,) float64, how many each row has; a row without any leaves the statistics.

    Returns:
        The groups, on the device of `lengths`.

    Raises:
        ShapeError: a label list's length is not B.
        ArgumentError: a label is not hashable.

    Warns:
        SingletonGroupWarning: once, where a group holds a single rollout (judged by the labels alone).
    """
    num_rows = lengths.shape[0]
    check_rows(where, "groups", groups, num_rows)
    group_numbers, num_groups = _number(_as_list(groups))
    if rollouts is None:
        unit_numbers, unit_groups = list(range(num_rows)), group_numbers
    else:
        check_rows(where, "rollouts", rollouts, num_rows)
        pairs = list(zip(group_numbers, _as_list(rollouts), strict=True))
        unit_numbers, _ = _number(list(pairs))
        unit_groups = [group for group, _ in dict.fromkeys(pairs)]
    device = lengths.device
    if 1 in Counter(unit_groups).values():
        warnings.warn(
            f"{where}: a group with a single rollout has itself as its baseline; its advantages are 0. "
            "Sample at least two responses a prompt (rollout.n ≥ 2).",
            SingletonGroupWarning,
            stacklevel=5,
        )
    return Groups(
        group=torch.tensor(group_numbers, dtype=torch.int64, device=device),
        unit=torch.tensor(unit_numbers, dtype=torch.int64, device=device),
        unit_group=torch.tensor(unit_groups, dtype=torch.int64, device=device),
        num_groups=num_groups,
        valid=valid,
        lengths=lengths,
    )
