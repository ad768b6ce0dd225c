"""The table of columns, and the check of a batch against it."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from ostinato.protocol import DataProto, columns, errors


def _rollout(b=2, p=3, r=4):
    return DataProto.from_dict(
        {
            "prompts": torch.zeros(b, p, dtype=torch.int64),
            "responses": torch.zeros(b, r, dtype=torch.int64),
            "input_ids": torch.zeros(b, p + r, dtype=torch.int64),
            "attention_mask": torch.ones(b, p + r, dtype=torch.int64),
            "position_ids": torch.zeros(b, p + r, dtype=torch.int64),
            "response_mask": torch.ones(b, r, dtype=torch.int64),
            "rollout_log_probs": torch.zeros(b, r),
        },
        {"uid": ["a"] * b, "rollout_id": np.arange(b), "finish_reason": ["stop"] * b},
    )


def _with(name, value):
    x = _rollout()
    return x.drop([n for n in x.columns if n == name]).union(DataProto.from_single_dict({name: value}))


def test_every_column_is_declared_once_and_whole():
    declared = [column.name for column in columns._DECLARED]
    assert len(set(declared)) == len(declared)
    assert list(columns.COLUMNS) == declared
    for column in columns.COLUMNS.values():
        assert column.producer
        assert column.readers
        assert column.holds
        assert all(re.fullmatch(r"[PR](\+[PR])*", letters) for letters in column.shape)
        assert "mask" not in column.name or torch.bool in column.accepts
    assert set(columns.PROMPT) | set(columns.ROLLOUT) <= set(declared)


def test_columns_of_the_design_are_declared_as_there():
    for name in ("old_log_probs", "ref_log_prob", "values", "token_level_scores", "token_level_rewards", "advantages",
                 "returns", "rollout_log_probs"):  # fmt: skip
        assert columns.COLUMNS[name].dtype == torch.float32
        assert columns.COLUMNS[name].shape == ("R",)
    for name in ("uid", "rollout_id", "data_source", "reward_model", "extra_info", "raw_prompt"):
        assert columns.COLUMNS[name].dtype is None


def complaint(batch, reads) -> str:
    """What `validate` has to say of a batch; empty where it passes."""
    try:
        columns.validate(batch, reads)
    except errors.ProtocolError as error:
        return str(error)
    return ""


def test_a_whole_batch_passes():
    assert complaint(_rollout(), columns.ROLLOUT) == ""
    assert complaint(_rollout(), columns.PROMPT) == ""
    assert complaint(_rollout(b=0), columns.ROLLOUT) == ""
    assert complaint(_rollout().select(columns.PROMPT), iter(columns.PROMPT)) == ""
    assert complaint(_rollout(), []) == ""
    assert complaint(_with("own", torch.ones(2, 9)), ["own"]) == ""


def test_missing_columns_are_named_with_their_producers():
    with pytest.raises(errors.MissingColumnError, match=r"'old_log_probs' \(from actor.compute_log_prob\), 'own'"):
        columns.validate(_rollout(), ["responses", "old_log_probs", "own"])
    with pytest.raises(errors.MissingColumnError, match="'values'"):
        columns.validate(_rollout(), "values")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("rollout_log_probs", torch.zeros(2, 4, dtype=torch.bfloat16), "float32, got torch.bfloat16"),
        ("responses", torch.zeros(2, 4), "int64, got torch.float32"),
        ("response_mask", torch.zeros(2, 4), "int64, got torch.float32"),
        ("response_mask", torch.zeros(2, 5, dtype=torch.bool), "R = 4 .from 'responses'. wide, got 5"),
        (
            "input_ids",
            torch.zeros(2, 8, dtype=torch.int64),
            "P.R = 3 .from 'prompts'. . 4 .from 'responses'. wide, got 8",
        ),
        ("values", torch.zeros(2), r"\(B, R\), got \(2,\)"),
        ("mini_batch", torch.zeros(2, 1, dtype=torch.int64), r"\(B\), got \(2, 1\)"),
        ("uid", torch.zeros(2), "numpy column, got a tensor"),
        ("old_log_probs", np.zeros((2, 4)), "tensor, got a numpy column"),
    ],
)
def test_columns_that_are_not_as_declared_are_named(name, value, says):
    """P-211."""
    with pytest.raises(errors.ColumnMismatchError, match=says) as caught:
        columns.validate(_with(name, value), [name])
    assert f"'{name}'" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8])
def test_masks_may_be_any_integer(dtype):
    assert complaint(_with("response_mask", torch.ones(2, 4).to(dtype)), ["response_mask"]) == ""


def test_jagged_columns_pass_without_widths():
    assert complaint(_with("advantages", [torch.ones(1), torch.ones(3)]), ["advantages"]) == ""


def test_widths_must_agree_where_nothing_else_tells_them():
    x = DataProto.from_dict({"values": torch.zeros(2, 4), "returns": torch.zeros(2, 5)})
    with pytest.raises(errors.ColumnMismatchError, match=r"R = 4 .from 'values'. wide, got 5"):
        columns.validate(x, ["values", "returns"])


def test_a_handle_without_rows_is_checked_by_name():
    class Handle:
        columns = ("uid",)

    assert complaint(Handle(), ["uid"]) == ""
    with pytest.raises(errors.MissingColumnError, match="'values'"):
        columns.validate(Handle(), ["values"])
