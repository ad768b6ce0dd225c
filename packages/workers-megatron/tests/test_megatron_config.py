from __future__ import annotations

import pickle
import re
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest

from ostinato.workers.megatron import MegatronConfig, MegatronError
from ostinato.workers.megatron.config import as_megatron_config, layout_problems
from ostinato.workers.megatron.errors import MegatronConfigError


def test_megatron_import_touches_no_device_and_no_engine():
    """H-61: importing the package, its config and its engine's name needs no GPU and imports no Megatron-Core."""
    code = (
        "import sys\n"
        "import ostinato.workers.megatron as wheel\n"
        "assert not {'torch', 'megatron', 'transformers'} & set(sys.modules)\n"
        "from ostinato.workers.core.config import ModelConfig\n"
        "wheel.MegatronEngine(head='lm', model=ModelConfig(path='x'), trainable=False)\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('megatron', 'transformers')]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"tensor_model_parallel_size": 0}, "megatron.tensor_model_parallel_size: expected .* at least 1, got 0"),
        ({"context_parallel_size": None}, "megatron.context_parallel_size: expected .* at least 1, got None"),
        ({"pipeline_model_parallel_size": "2"}, "megatron.pipeline_model_parallel_size: .*, got '2'"),
        ({"expert_model_parallel_size": 2.0}, "megatron.expert_model_parallel_size: .*, got 2.0"),
        ({"tensor_model_parallel_size": True}, "megatron.tensor_model_parallel_size: .*, got True"),
        ({"expert_tensor_parallel_size": 0}, "megatron.expert_tensor_parallel_size: .* at least 1, or null, got 0"),
        ({"dtype": "fp8"}, "megatron.dtype: expected one of auto, fp32, bf16"),
        ({"override_transformer_config": {"sequence_parallel": True}}, "use megatron.sequence_parallel"),
        ({"override_transformer_config": {"calculate_per_token_loss": False}}, "leave it out"),
        (
            {"override_transformer_config": {"transformer_impl": "te"}},
            "expected one of local, .*, got 'te'",
        ),
        (
            {"override_transformer_config": {"transformer_impl": None}},
            "expected one of local, .*, got None",
        ),
        ({"tensor_parallel_size": 2}, "did you mean tensor_model_parallel_size"),
    ],
)
def test_megatron_config_refuses_what_cannot_work(entries, text):
    with pytest.raises(MegatronConfigError, match=text) as caught:
        as_megatron_config(entries)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert isinstance(again, (MegatronError, ValueError))


@pytest.mark.parametrize(
    ("entries", "ranks", "key", "text"),
    [
        ({"tensor_model_parallel_size": 3}, 4, "tensor_model_parallel_size", "4 attention heads; take one of [1, 2]"),
        ({"tensor_model_parallel_size": 4}, 4, "tensor_model_parallel_size", "2 key/value heads; take one of [1, 2]"),
        ({"pipeline_model_parallel_size": 4}, 4, "pipeline_model_parallel_size", "6 layers; take one of [1, 2]"),
        ({"pipeline_model_parallel_size": 3}, 4, "pipeline_model_parallel_size", "do not divide 4; take one of [1, 2]"),
        (
            {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3},
            8,
            "pipeline_model_parallel_size",
            "tp 2 × pp 3 × cp 1 = 6 ranks do not divide 8; take one of [1, 2]",
        ),
        (
            {"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
            4,
            "virtual_pipeline_model_parallel_size",
            "three stages or more",
        ),
        ({"sequence_parallel": True}, 4, "sequence_parallel", "set it to False"),
        ({"tensor_model_parallel_size": 2}, 4, "sequence_parallel", "trains a mixture"),
        ({"expert_model_parallel_size": 3}, 3, "expert_model_parallel_size", "4 experts; take one of [1]"),
        ({"context_parallel_size": 3}, 4, "context_parallel_size", "do not divide 4; take one of [1, 2, 4]"),
        ({"expert_tensor_parallel_size": 3}, 4, "expert_tensor_parallel_size", "take one of [1, 2, 4]"),
        (
            {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3, "context_parallel_size": 3},
            4,
            "pipeline_model_parallel_size",
            "change the other sizes first",
        ),
        (
            {"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_size": 4},
            12,
            "pipeline_model_parallel_size",
            "8 pieces (stages × virtual stages) do not divide the model's 6 layers; take one of [3]",
        ),
        ({"expert_model_parallel_size": 4}, 2, "expert_model_parallel_size", "take one of [1, 2]"),
    ],
)
def test_megatron_layout_that_does_not_fit_names_the_number_that_would(entries, ranks, key, text):
    config = MegatronConfig(**entries)
    problems = layout_problems(config, ranks, num_heads=4, num_kv_heads=2, num_layers=6, num_experts=4)
    assert key in dict(problems)
    assert any(name == key and text in message for name, message in problems), problems


def test_megatron_layout_advice_leads_to_no_other_fault():
    """Every size that a text names, set alone, makes that key's faults go and brings none of another key."""
    numbers = {"num_heads": 12, "num_kv_heads": 4, "num_layers": 6, "num_experts": 8}
    advised = 0
    for tp, pp, ep, virtual, ranks in product((1, 2, 3, 4), (1, 2, 3, 4), (1, 3, 4), (None, 2), (4, 6, 24)):
        config = MegatronConfig(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            virtual_pipeline_model_parallel_size=virtual,
        )
        problems = layout_problems(config, ranks, **numbers)
        for key, text in problems:
            for size in re.findall(r"\d+", text.partition("; take one of ")[2]):
                left = layout_problems(replace(config, **{key: int(size)}), ranks, **numbers)
                assert {name for name, _ in left} <= {name for name, _ in problems} - {key}, (config, text, left)
                advised += 1
    assert advised > 100


def test_megatron_layout_that_fits_has_no_problem():
    config = MegatronConfig(pipeline_model_parallel_size=2, expert_model_parallel_size=2)
    assert layout_problems(config, 8, num_heads=4, num_kv_heads=2, num_layers=6, num_experts=4) == []
    assert "the model has none" in layout_problems(config, 8, num_experts=0)[0][1]
