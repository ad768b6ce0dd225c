from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ostinato.workers.core.testing import conformance
from ostinato.workers.core.testing.lora import ADAPTER, with_model
from ostinato.workers.core.testing.spawn import spawn
from ostinato.workers.fsdp.testing import fsdp, two_ranks_of_features


@pytest.mark.usefixtures("process_group")
def test_two_ranks_share_sequences_adapters_and_loading(workspace, tmp_path):
    """Rows whose tokens do not divide by two, and none at all, included; adapters saved at two ranks resume at one.

    No rank holds the whole model while it loads, rank 0 neither, which reads: a rank needs its half, and what is on its
    way.
    """
    for name in ("lm", "tied", "value", "adapted/lm"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(workspace / name.split("/")[-1])
    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu").to(torch.bfloat16).save_pretrained(tmp_path / "large")
    del model
    for loading in spawn(two_ranks_of_features, 2, tmp_path, tmp_path / "large"):
        assert loading["weights"] > 200e6
        assert loading["peak"] < 0.85 * loading["weights"]
    conformance.load_from_other_world(with_model(fsdp(), **ADAPTER), tmp_path / "adapted")
