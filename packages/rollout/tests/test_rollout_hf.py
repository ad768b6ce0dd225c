from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from ostinato.rollout import RolloutConfig, SamplingParams, build_rollout, decoding
from ostinato.rollout.backends.hf import HfRollout
from ostinato.rollout.decoding import GrowingLayer, first_occurrences
from ostinato.rollout.errors import ConfigError, GenerationError, WeightMismatchError
from ostinato.rollout.live_weights import _strided_place, model_specs
from ostinato.rollout.reshard import reshard
from ostinato.rollout.testing import ModuleWeights, make_prompts, save_tiny_model

LISTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17], [20, 21], [30, 31, 32, 33]]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ARCHITECTURES = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral-sliding": lambda: transformers.MistralConfig(**SIZES, sliding_window=4),
    "gemma2-alternating": lambda: transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=4),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=8),
    "qwen3-experts": lambda: transformers.Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "mixtral-renamed-experts": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "gpt2-learned-positions": lambda: transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64
    ),
}


def config(**changes) -> RolloutConfig:
    return RolloutConfig(**{"dtype": "float32", "prompt_length": 8, "response_length": 24, **changes})


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hf_equals_transformers_generate_for_other_architectures(name, tmp_path):
    """Sliding windows, soft-capped logits, learned positions: tokens of greedy `generate`, log-probs of a forward."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(ARCHITECTURES[name]()).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path)
    prompts = make_prompts(LISTS, width=8)
    assert prompts.batch is not None
    with reshard(ModuleWeights(model), build_rollout(config(), model_path=tmp_path), check=True) as rollout:
        rows = rollout.generate(prompts, SamplingParams(temperature=0, eos_token_ids=()))
    assert rows.batch is not None
    for i, tokens in enumerate(LISTS):
        ids = torch.tensor([tokens])
        expected = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        assert rows.batch["responses"][i].tolist() == expected[0, len(tokens) :].tolist()
        with torch.no_grad():
            table = model(input_ids=expected).logits[0, len(tokens) - 1 : -1].log_softmax(-1)
        log_probs = table.gather(-1, rows.batch["responses"][i][:, None]).squeeze(-1)
        torch.testing.assert_close(rows.batch["rollout_log_probs"][i], log_probs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hf_wants_the_weights_of_the_model_folder(name, tmp_path):
    """H-52: names and shapes are those of the safetensors file, where a mixture's experts lie apart."""
    from safetensors import safe_open

    transformers.AutoModelForCausalLM.from_config(ARCHITECTURES[name]()).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        expected = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    specs = build_rollout(config(), model_path=tmp_path).specs()
    assert {key: spec.shape for key, spec in specs.items() if spec.tied_to is None} == expected


def test_strided_place_follows_positions():
    whole = torch.arange(24).view(4, 6)
    for part in (whole, whole.t(), whole[1:3, 2:], whole[:, 3], whole[2:3], whole[1, 1], whole.view(2, 2, 6)[:, 1]):
        place = _strided_place("p", "n", part.contiguous())
        assert torch.equal(whole.as_strided(place.shape, place.stride, place.offset), part)
    with pytest.raises(WeightMismatchError, match="strided part"):
        _strided_place("p", "n", whole[torch.tensor([0, 3, 1])])


def test_hf_learned_positions_never_run_past_the_context(tmp_path):
    """H-45: a row at the end of its context stays in the batch while another goes on."""
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 8}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    model.save_pretrained(tmp_path)
    with reshard(ModuleWeights(model), build_rollout(config(response_length=6), model_path=tmp_path)) as rollout:
        lists = [[5, 6], [6, 7], [7, 8], [8, 9], [5, 6, 7, 8, 9, 10, 11]]
        rows = rollout.generate(make_prompts(lists), SamplingParams(eos_token_ids=()))
    assert rows.batch is not None
    assert rows.batch["response_mask"].sum(-1).tolist() == [6, 6, 6, 6, 1]
    with pytest.raises(ConfigError, match=r"max_model_len: expected at most the model's"):
        build_rollout(config(max_model_len=9), model_path=tmp_path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    return path, save_tiny_model(path)


def responses(rows) -> list[list[int]]:
    lengths = rows.batch["response_mask"].sum(-1).tolist()
    return [row[:n] for row, n in zip(rows.batch["responses"].tolist(), lengths, strict=True)]


def test_hf_repeats_to_the_bit(tiny):
    path, model = tiny
    prompts = make_prompts(LISTS * 3, width=8)
    outs = []
    for _ in range(2):
        with reshard(ModuleWeights(model), build_rollout(config(), model_path=path)) as rollout:
            outs += [rollout.generate(prompts, SamplingParams(seed=3)) for _ in range(2)]
    for other in outs[1:]:
        for name, tensor in outs[0].batch.items():
            assert torch.equal(tensor, other.batch[name]), name


def test_hf_compaction_changes_nothing(tiny):
    """Rows that end early leave the batch; the others' tokens are those of a run without ends, cut at the first one."""
    path, model = tiny
    prompts = make_prompts(LISTS * 8, width=8)
    ends = tuple(range(2, 40))
    with reshard(ModuleWeights(model), build_rollout(config(response_length=70), model_path=path)) as rollout:
        free = rollout.generate(prompts, SamplingParams(eos_token_ids=()))
        ended = rollout.generate(prompts, SamplingParams(eos_token_ids=ends))
    expected = [row[: 1 + next((j for j, t in enumerate(row) if t in ends), len(row))] for row in responses(free)]
    assert responses(ended) == expected
    assert len({len(row) for row in expected}) > 10, "the rows end at many different places"
    torch.testing.assert_close(
        ended.batch["rollout_log_probs"],
        free.batch["rollout_log_probs"] * ended.batch["response_mask"],
        atol=1e-4,
        rtol=0,
    )
    assert ended.non_tensor_batch["finish_reason"].tolist() == ["stop" if r[-1] in ends else "length" for r in expected]


def test_hf_looking_seldom_at_ended_rows_changes_nothing(tiny, monkeypatch):
    """Accelerators are asked only now and then which rows have ended."""
    path, model = tiny
    prompts = make_prompts(LISTS * 4, width=8)
    sampling = SamplingParams(eos_token_ids=tuple(range(2, 60)))
    with reshard(ModuleWeights(model), build_rollout(config(response_length=37), model_path=path)) as rollout:
        often = rollout.generate(prompts, sampling)
        monkeypatch.setitem(decoding._LOOK_EVERY, "cpu", 8)
        seldom = rollout.generate(prompts, sampling)
    assert responses(seldom) == responses(often)
    assert seldom.non_tensor_batch["finish_reason"].tolist() == often.non_tensor_batch["finish_reason"].tolist()


def test_hf_finished_rows_leave_the_batch(tiny, monkeypatch):
    path, model = tiny
    sizes = []
    with reshard(ModuleWeights(model), build_rollout(config(), model_path=path)) as rollout:
        forward = rollout._model.forward

        def watched(*args, **kwargs):
            sizes.append(kwargs["input_ids"].shape)
            return forward(*args, **kwargs)

        monkeypatch.setattr(rollout._model, "forward", watched)
        rollout.generate(make_prompts([[5, 6, 7]] * 16 + [[9]]), SamplingParams(eos_token_ids=tuple(range(2, 100))))
    assert sizes[0] == (2, 3), "the prompt of sixteen samples is run once"
    rows = [size[0] for size in sizes[1:]]
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < rows[0]


@pytest.mark.parametrize(("seqs", "tokens"), [(1, 1), (3, 1), (3, 100), (100, 9)])
def test_hf_batch_limits_change_no_sample(seqs, tokens, tiny, monkeypatch):
    path, model = tiny
    prompts = make_prompts(LISTS * 2, width=8)
    widest = []
    outs = []
    for changes in ({}, {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}):
        with reshard(ModuleWeights(model), build_rollout(config(**changes), model_path=path)) as rollout:
            forward = rollout._model.forward

            def watched(*args, forward=forward, **kwargs):
                widest.append(tuple(kwargs["input_ids"].shape))
                return forward(*args, **kwargs)

            monkeypatch.setattr(rollout._model, "forward", watched)
            widest.clear()
            outs.append(responses(rollout.generate(prompts, SamplingParams(eos_token_ids=()))))
    assert outs[0] == outs[1]
    assert max(shape[0] for shape in widest) <= seqs
    assert all(rows == 1 or rows * width <= tokens for rows, width in widest if width > 1)


def test_hf_end_tokens_come_from_the_model(tmp_path):
    save_tiny_model(tmp_path, eos_token_id=3)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)

    def ends(tokenizer=None):
        return HfRollout(config(), model_path=tmp_path, tokenizer=tokenizer)._eos

    assert ends() == (3,)
    assert ends(SimpleNamespace(eos_token_id=4, pad_token_id=None)) == (4,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert ends() == (5, 6)
    assert ends(SimpleNamespace(eos_token_id=4)) == (5, 6, 4)


def test_hf_pads_with_the_declared_token_or_any(tmp_path):
    """H-42: without a padding token an end token fills the places; masks come from lengths."""
    save_tiny_model(tmp_path, pad_token_id=None, eos_token_id=3)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    assert HfRollout(config(), model_path=tmp_path)._pad == 3
    tokenizer = SimpleNamespace(pad_token_id=7, eos_token_id=4)
    assert HfRollout(config(), model_path=tmp_path, tokenizer=tokenizer)._pad == 7


def test_hf_padding_token_inside_a_response_is_a_token(tiny):
    """H-42: the model may sample the padding token; it counts."""
    path, model = tiny
    prompts = make_prompts(LISTS, width=8)
    with reshard(ModuleWeights(model), build_rollout(config(), model_path=path)) as rollout:
        free = responses(rollout.generate(prompts, SamplingParams(eos_token_ids=())))
        rollout._pad = free[0][3]
        again = rollout.generate(prompts, SamplingParams(eos_token_ids=()))
    assert responses(again) == free


def test_hf_refuses_weights_that_are_not_numbers(tmp_path):
    model = save_tiny_model(tmp_path)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with (
        pytest.raises(GenerationError, match=r"rollout_id \[4\]"),
        reshard(ModuleWeights(model), build_rollout(config(), model_path=tmp_path)) as rollout,
    ):
        rollout.generate(make_prompts([[5]], rollout_ids=[4]), SamplingParams())


def test_hf_load_format_auto_generates_until_it_sleeps(tiny):
    path, model = tiny
    prompts = make_prompts(LISTS, width=8)
    greedy = SamplingParams(temperature=0, eos_token_ids=())
    with reshard(ModuleWeights(model), build_rollout(config(), model_path=path)) as rollout:
        expected = responses(rollout.generate(prompts, greedy))
    read = build_rollout(config(load_format="auto"), model_path=path)
    read.wake("weights")
    read.wake("kv_cache")
    assert responses(read.generate(prompts, greedy)) == expected


@pytest.mark.parametrize("free", [True, False])
def test_hf_sleep_gives_memory_back_as_asked(free, tiny):
    path, model = tiny
    rollout = build_rollout(config(free_cache_engine=free), model_path=path)

    def held() -> int:
        return rollout._weights.num_bytes()

    assert held() == 0, "an engine that gets its weights from training holds none before"
    with reshard(ModuleWeights(model), rollout):
        whole = held()
    assert whole == sum(p.numel() * 4 for p in model.parameters())
    assert held() == (0 if free else whole)
    rollout.close()
    assert held() == 0


def test_hf_building_and_generating_leave_the_global_generator_alone(tiny):
    path, model = tiny
    before = torch.get_rng_state()
    with reshard(ModuleWeights(model), build_rollout(config(), model_path=path)) as rollout:
        rollout.generate(make_prompts(LISTS), SamplingParams())
    assert torch.equal(torch.get_rng_state(), before)


def test_hf_outputs_can_be_trained_on(tiny):
    """Nothing that comes back is an inference tensor."""
    path, model = tiny
    with reshard(ModuleWeights(model), build_rollout(config(), model_path=path)) as rollout:
        rows = rollout.generate(make_prompts(LISTS, width=8), SamplingParams())
    assert not any(tensor.is_inference() for tensor in rows.batch.values())
    weight = torch.ones((), requires_grad=True)
    (rows.batch["rollout_log_probs"] * weight).sum().backward()
    assert weight.grad is not None


def test_hf_refuses_what_it_cannot_do(tiny):
    path, model = tiny
    with pytest.raises(ConfigError, match="tensor_model_parallel_size"):
        build_rollout(config(tensor_model_parallel_size=2), model_path=path)
    with reshard(ModuleWeights(model), build_rollout(config(), model_path=path)) as rollout:
        with pytest.raises(ConfigError, match="response_length=24, got 25"):
            rollout.generate(make_prompts(LISTS), SamplingParams(max_tokens=25))
        with pytest.raises(WeightMismatchError, match="full tensors"):
            rollout.load_weights([("model.norm.weight", torch.ones(64))])


def test_hf_validation_restrictions_hold(tiny):
    path, model = tiny
    sampling = SamplingParams(top_k=1, eos_token_ids=())
    with reshard(ModuleWeights(model), build_rollout(config(), model_path=path)) as rollout:
        only = rollout.generate(make_prompts(LISTS), sampling)
        greedy = rollout.generate(make_prompts(LISTS), replace(sampling, top_k=-1, temperature=0))
    assert responses(only) == responses(greedy)


def test_growing_layer_equals_concatenation():
    from transformers.cache_utils import DynamicLayer

    draw = torch.Generator().manual_seed(0)
    first = torch.randn(3, 2, 5, 4, generator=draw)
    plain = DynamicLayer()
    plain.update(first, first + 1)
    ours = GrowingLayer(first.clone(), first + 1, most=400)
    for step in range(300):
        new = torch.randn(len(plain.keys), 2, 1, 4, generator=draw)
        expected, got = plain.update(new, -new), ours.update(new, -new)
        assert torch.equal(expected[0], got[0])
        assert torch.equal(expected[1], got[1])
        if step in (10, 200):
            keep = torch.tensor([0, len(plain.keys) - 1])
            plain.batch_select_indices(keep)
            ours.batch_select_indices(keep)
        assert ours.get_seq_length() == plain.get_seq_length()
    assert ours._buffers[0].shape[-2] <= 400


def test_first_occurrences_of_rows():
    rows = np.asarray([[1, 2], [3, 4], [1, 2], [3, 5], [3, 4]])
    first, inverse = first_occurrences(rows)
    assert first.tolist() == [0, 1, 3]
    assert inverse.tolist() == [0, 1, 0, 2, 1]


def test_specs_of_an_engine_have_buffers_in_float32():
    """Engines keep a router's correction in it; what travels in bfloat16 is rounded before it gets there."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "num_local_experts": 4}
    tokens = {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.MiniMaxM2Config(**tokens, **sizes, hidden_size=16, intermediate_size=8, head_dim=8)
    dtypes = {name: spec.dtype for name, spec in model_specs(config, torch.bfloat16).items()}
    assert dtypes.pop("model.layers.0.block_sparse_moe.e_score_correction_bias") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}
