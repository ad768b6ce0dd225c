from __future__ import annotations

import pytest

from ostinato.workers.core.config import ModelConfig
from ostinato.workers.fsdp import FsdpEngine
from ostinato.workers.fsdp.errors import FsdpConfigError
from ostinato.workers.fsdp.ulysses import check_model


def _model(heads, kv_heads):
    config = type("Config", (), {"num_attention_heads": heads, "num_key_value_heads": kv_heads})()
    config.get_text_config = lambda: config
    return type("Model", (), {"config": config})()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "good"), [(14, 2, [1, 2, 14]), (28, 4, [1, 2, 4, 28]), (8, None, [1, 2, 4, 8])]
)
def test_ulysses_sizes_that_fit_the_heads(heads, kv_heads, good):
    for size in range(1, heads + 1):
        if size in good:
            check_model(_model(heads, kv_heads), size, "varlen", "varlen")
        else:
            with pytest.raises(FsdpConfigError, match=f"these do: {', '.join(map(str, good))}"):
                check_model(_model(heads, kv_heads), size, "varlen", "varlen")


def test_ulysses_of_a_model_without_attention_heads_is_refused_by_name():
    """Mamba's config has none."""
    with pytest.raises(FsdpConfigError, match=r"expected a model with plain causal attention .* got Mamba"):
        check_model(type("Mamba", (), {"config": object()})(), 2, "eager", "varlen")


@pytest.mark.usefixtures("process_group")
def test_ulysses_refuses_what_it_would_get_wrong(workspace, monkeypatch):
    def build(size, **model):
        engine = FsdpEngine(
            head="lm",
            model=ModelConfig(path=str(workspace / "lm"), **model),
            engine={"ulysses_sequence_parallel_size": size},
        )
        engine.build()

    with pytest.raises(FsdpConfigError, match="divisor of the world size 1, got 2"):
        build(2)
    monkeypatch.setattr("ostinato.workers.fsdp.engine.divide_rows", lambda *_: None)
    with pytest.raises(FsdpConfigError, match="attn_implementation=sdpa"):
        build(2, use_remove_padding=False)
    with pytest.raises(FsdpConfigError, match="attn_implementation=eager"):
        build(2, override_config={"attn_implementation": "eager"})
    with pytest.raises(FsdpConfigError, match="4 attention heads"):
        build(3)
