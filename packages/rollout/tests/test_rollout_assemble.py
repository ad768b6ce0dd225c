from __future__ import annotations

import numpy as np
import pytest
import torch

from ostinato.protocol import DataProto
from ostinato.rollout.assemble import Completion, assemble, check_prompts, prompt_token_ids, rollout_ids
from ostinato.rollout.errors import PromptError
from ostinato.rollout.testing import make_prompts

PROMPTS = make_prompts([[5, 6], [7, 8, 9]], width=4, rollout_ids=[10, 11])


def test_assemble_pads_by_hand():
    rows = assemble(
        PROMPTS,
        [Completion(1, [1], [-0.5], "stop"), Completion(0, [3, 4, 2], [-1.0, -2.0, -3.0], "length")],
        response_length=4,
        pad_token_id=99,
    )
    assert rows.batch is not None
    t = {str(name): tensor.tolist() for name, tensor in rows.batch.items()}
    assert t["prompts"] == [[0, 0, 5, 6], [0, 7, 8, 9]]
    assert t["responses"] == [[3, 4, 2, 99], [1, 99, 99, 99]]
    assert t["input_ids"] == [[0, 0, 5, 6, 3, 4, 2, 99], [0, 7, 8, 9, 1, 99, 99, 99]]
    assert t["attention_mask"] == [[0, 0, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 0, 0, 0]]
    assert t["position_ids"] == [[0, 0, 0, 1, 2, 3, 4, 5], [0, 0, 1, 2, 3, 4, 5, 6]]
    assert t["response_mask"] == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert t["rollout_log_probs"] == [[-1.0, -2.0, -3.0, 0.0], [-0.5, 0.0, 0.0, 0.0]]
    assert rows.non_tensor_batch["finish_reason"].tolist() == ["length", "stop"]
    assert rows.non_tensor_batch["uid"].tolist() == ["prompt-0", "prompt-1"]
    assert list(rows.non_tensor_batch["rollout_id"]) == [10, 11]


def test_assemble_takes_several_rows_of_one_rollout():
    completions = [
        Completion(0, [3], [-1.0], "length"),
        Completion(1, [4], [-1.0], "stop"),
        Completion(0, [9, 1], [-2.0, -3.0], "stop", prompt_token_ids=[5, 6, 3]),
    ]
    rows = assemble(PROMPTS, completions, response_length=3, pad_token_id=0)
    assert list(rows.non_tensor_batch["rollout_id"]) == [10, 10, 11]
    assert rows.batch is not None
    assert rows.batch["prompts"].tolist() == [[0, 0, 5, 6], [0, 5, 6, 3], [0, 7, 8, 9]]
    assert rows.batch["position_ids"][1].tolist() == [0, 0, 1, 2, 3, 4, 5]
    assert PROMPTS.batch is not None
    assert PROMPTS.batch["input_ids"].tolist() == [[0, 0, 5, 6], [0, 7, 8, 9]], "the operand is as it was"


def test_assemble_masks_tool_output():
    completions = [
        Completion(0, [3, 8, 8, 1], [-1.0, 5.0, 5.0, -2.0], "stop", sampled=[True, False, False, True]),
        Completion(1, [], [], "length"),
    ]
    rows = assemble(PROMPTS, completions, response_length=5, pad_token_id=0)
    assert rows.batch is not None
    assert rows.batch["response_mask"].tolist() == [[1, 0, 0, 1, 0], [0] * 5]
    assert rows.batch["attention_mask"][:, 4:].tolist() == [[1, 1, 1, 1, 0], [0] * 5]
    assert rows.batch["rollout_log_probs"].tolist() == [[-1.0, 0.0, 0.0, -2.0, 0.0], [0.0] * 5]


@pytest.mark.parametrize("tokens", [[], [3], [3, 4, 5]])
def test_assemble_marks_aborted_rows_and_gives_them_nothing_to_train_on(tokens):
    """H-46: whatever had come before the abort."""
    completions = [Completion(0, tokens, [-1.0] * len(tokens), "abort"), Completion(1, [1], [-1.0], "stop")]
    rows = assemble(PROMPTS, completions, response_length=3, pad_token_id=0)
    assert rows.batch is not None
    assert rows.non_tensor_batch["finish_reason"].tolist() == ["abort", "stop"]
    assert rows.batch["response_mask"].tolist() == [[0, 0, 0], [1, 0, 0]]
    assert rows.batch["rollout_log_probs"][0].tolist() == [0.0] * 3
    assert rows.batch["responses"][0, : len(tokens)].tolist() == tokens


def test_assemble_of_nothing_has_every_column():
    none = assemble(make_prompts([], width=4), [], response_length=3, pad_token_id=0)
    some = assemble(PROMPTS[:1], [Completion(0, [1], [-1.0], "stop")], response_length=3, pad_token_id=0)
    assert len(none) == 0
    assert set(none.columns) == set(some.columns)
    assert len(DataProto.concat([none, some])) == 1


@pytest.mark.parametrize(
    ("completions", "match"),
    [
        ([Completion(0, [1], [0.0], "stop")], r"rows \[1\] have no completion"),
        ([Completion(i, [1], [0.0], "stop") for i in range(3)], r"rows \[2\] are not there"),
        ([Completion(0, [1, 2, 3], [0.0] * 3, "stop"), Completion(1, [1], [0.0], "stop")], "3 tokens"),
        ([Completion(0, [1], [], "stop"), Completion(1, [1], [0.0], "stop")], "0 log-probs"),
        ([Completion(0, [1], [0.0], "done"), Completion(1, [1], [0.0], "stop")], "'done'"),
        ([Completion(0, [1], [0.0], "stop", [True] * 2), Completion(1, [1], [0.0], "stop")], "flags"),
        (
            [Completion(0, [1], [0.0], "stop", None, [1] * 5), Completion(1, [1], [0.0], "stop")],
            "a prompt of 5 tokens",
        ),
    ],
)
def test_assemble_refuses_what_cannot_be_an_answer(completions, match):
    with pytest.raises(PromptError, match=match):
        assemble(PROMPTS, completions, response_length=2, pad_token_id=0)


def test_prompt_tokens_come_without_padding():
    """H-48: ids 0 0 5 6, mask 0 0 1 1: the engine gets 5 6; also where a real token equals the padding."""
    assert prompt_token_ids(make_prompts([[5, 6]], width=4)) == [[5, 6]]
    lists = [[0], [0, 0, 5], [5, 0], [9] * 6]
    for pad in (0, 5, -100):
        assert prompt_token_ids(make_prompts(lists, pad_token_id=pad)) == lists


@pytest.mark.parametrize("mask", [[1, 1, 0], [1, 0, 1], [0, 1, 0], [0, 0, 0]])
def test_prompts_refuse_padding_that_is_not_on_the_left(mask):
    prompts = make_prompts([[5, 6, 7], [5, 6, 7]])
    assert prompts.batch is not None
    prompts.batch["attention_mask"][1] = torch.tensor(mask)
    with pytest.raises(PromptError, match="prompt row 1 "):
        check_prompts(prompts)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_prompts_refuse_tokens_that_the_model_lacks(dtype):
    """Of any kind of integer that the column may be, some of which cannot even hold the model's number of tokens."""
    prompts = make_prompts([[5, 6], [7]])
    prompts.batch["input_ids"] = prompts.batch["input_ids"].to(dtype)
    assert check_prompts(prompts, vocab_size=1 << 17).tolist() == [2, 1]
    with pytest.raises(PromptError, match=r"row 0 holds the token 6, expected 0 to 5, the model's own; 2 of 2 rows"):
        check_prompts(prompts, vocab_size=6)


def test_prompts_refuse_what_fills_the_context():
    assert check_prompts(PROMPTS, 4).tolist() == [2, 3]
    with pytest.raises(PromptError, match="fewer than 3 tokens"):
        check_prompts(PROMPTS, 3)


@pytest.mark.parametrize("absent", ["input_ids", "attention_mask", "position_ids", "uid", "rollout_id"])
def test_prompts_refuse_a_missing_column(absent):
    with pytest.raises(PromptError, match=absent):
        check_prompts(PROMPTS.drop([absent]))


def test_rollout_ids_of_any_numeric_column():
    base = PROMPTS.drop(["rollout_id"])
    numbers = [3, 2**40]
    columns = [
        np.asarray(numbers),
        np.asarray(numbers, dtype=object),
        np.asarray([np.int64(n) for n in numbers], dtype=object),
    ]
    for column in columns:
        assert rollout_ids(base.union(DataProto.from_dict(None, {"rollout_id": column}))).tolist() == numbers
    tensors = base.union(DataProto.from_dict({"rollout_id": torch.tensor(numbers)}))
    assert rollout_ids(tensors).tolist() == numbers
    rows = assemble(tensors, [Completion(i, [1], [0.0], "stop") for i in (0, 1)], response_length=1, pad_token_id=0)
    assert rollout_ids(rows).tolist() == numbers


@pytest.mark.parametrize("values", [["a", "b"], [0.5, 1.0], [None, 1], [[1], [2, 3]]])
def test_rollout_ids_refuse_what_is_not_a_number(values):
    column = np.empty(2, dtype=object)
    column[:] = values
    with pytest.raises(PromptError, match="whole number"):
        rollout_ids(PROMPTS.drop(["rollout_id"]).union(DataProto.from_dict(None, {"rollout_id": column})))
