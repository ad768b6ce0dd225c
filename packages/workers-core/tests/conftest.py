from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ostinato.controller import LocalBackend
from ostinato.protocol import DataProto
from ostinato.workers.core.testing import tiny_causal_lm, tiny_reward_model

torch.set_num_threads(1)


@pytest.fixture
def backend():
    backend = LocalBackend()
    yield backend
    backend.shutdown()


@pytest.fixture(scope="session")
def lm_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_causal_lm(tmp_path_factory.mktemp("lm"))


@pytest.fixture(scope="session")
def rm_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_reward_model(tmp_path_factory.mktemp("rm"))


@pytest.fixture
def make_rows():
    """Rows of ragged lengths, left-padded prompts, right-padded responses, one with a tool token in the middle."""

    def make(num_rows: int = 6, prompt: int = 5, response: int = 6, seed: int = 0) -> DataProto:
        generator = torch.Generator().manual_seed(seed)
        attention = torch.zeros(num_rows, prompt + response, dtype=torch.int64)
        mask = torch.zeros(num_rows, response, dtype=torch.int64)
        for i in range(num_rows):
            left = int(torch.randint(1, prompt + 1, (), generator=generator))
            right = int(torch.randint(1, response + 1, (), generator=generator))
            attention[i, prompt - left : prompt + right] = 1
            mask[i, :right] = 1
            if right > 3:
                mask[i, 1] = 0
        ids = torch.randint(0, 256, (num_rows, prompt + response), generator=generator)
        ids[attention == 0] = 256

        def noise(scale: float = 1.0) -> torch.Tensor:
            return scale * torch.randn(num_rows, response, generator=generator) * mask

        return DataProto.from_dict(
            {
                "input_ids": ids,
                "attention_mask": attention,
                "response_mask": mask,
                "advantages": noise(),
                "returns": noise(),
                "values": noise(),
                "old_log_probs": -3 * mask + noise(0.1),
                "ref_log_prob": -3 * mask + noise(0.1),
            }
        )

    return make
