from __future__ import annotations

from ostinato.rollout import RolloutConfig, SamplingParams
from ostinato.rollout.backends.fake import FakeRollout
from ostinato.rollout.reshard import reshard
from ostinato.rollout.testing import ModuleWeights, make_prompts, save_tiny_model

CONFIG = RolloutConfig(name="fake", prompt_length=4, response_length=6)


class Nothing:
    def specs(self):
        return {}

    def weights(self):
        return iter(())


def test_fake_answers_from_a_script_and_records():
    rollout = FakeRollout(CONFIG, script=lambda prompt, number, sampling: [prompt[-1], number + 2, 1, 9])
    with reshard(Nothing(), rollout):
        rows = rollout.generate(make_prompts([[5, 6], [7]]), SamplingParams())
    assert rows.batch is not None
    assert rows.batch["responses"].tolist() == [[6, 2, 1, 0, 0, 0], [7, 3, 1, 0, 0, 0]]
    assert rows.non_tensor_batch["finish_reason"].tolist() == ["stop", "stop"]
    assert rollout.calls[-2] == ("generate", (2, SamplingParams()))


def test_fake_returns_several_rows_where_told():
    rollout = FakeRollout(CONFIG, rows_per_rollout={1: 3}, abort=[0])
    with reshard(Nothing(), rollout):
        rows = rollout.generate(make_prompts([[5], [6], [7]]), SamplingParams())
    assert [int(i) for i in rows.non_tensor_batch["rollout_id"]] == [0, 1, 1, 1, 2]
    assert rows.non_tensor_batch["uid"].tolist() == ["prompt-0", *["prompt-1"] * 3, "prompt-2"]
    assert rows.non_tensor_batch["finish_reason"].tolist() == ["abort", *["length"] * 4]


def test_fake_wants_the_weights_of_a_model_folder(tmp_path):
    model = save_tiny_model(tmp_path)
    rollout = FakeRollout(CONFIG, model_path=tmp_path)
    with reshard(ModuleWeights(model), rollout, check=True):
        assert set(rollout.weights) == {name for name, _ in model.named_parameters()}
