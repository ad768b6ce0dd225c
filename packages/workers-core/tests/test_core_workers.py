from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ostinato.controller import LocalBackend, WorkerSpec, registration_of
from ostinato.protocol import DataProto
from ostinato.protocol.columns import COLUMNS
from ostinato.protocol.errors import MissingColumnError
from ostinato.rollout import RolloutConfig
from ostinato.rollout.errors import WeightMismatchError
from ostinato.workers.core import (
    ActorConfig,
    ActorRolloutRefConfig,
    ActorRolloutRefWorker,
    CriticConfig,
    CriticWorker,
    ModelConfig,
    OptimConfig,
    RefConfig,
    RewardModelWorker,
)
from ostinato.workers.core.errors import ConfigError, RoleError
from ostinato.workers.core.testing import PlainConfig, tiny_causal_lm
from ostinato.workers.core.testing.models import EOS

ENGINE = "ostinato.workers.core.testing:PlainEngine"
ROLLOUT = RolloutConfig(
    name="hf", dtype="float32", prompt_length=8, response_length=6, temperature=0.9, n=2, load_format="dummy"
)


def policy(path, **changes) -> ActorRolloutRefConfig:
    config = ActorRolloutRefConfig(
        model=ModelConfig(path=str(path)),
        actor=ActorConfig(optim=OptimConfig(lr=1e-2), num_mini_batches=2, ppo_micro_batch_size_per_gpu=2),
        rollout=ROLLOUT,
    )
    return replace(config, **changes)


def worker_of(config, role) -> ActorRolloutRefWorker:
    """A worker without a backend, to look inside."""
    worker = ActorRolloutRefWorker(config, role, ENGINE)
    worker.init_model()
    return worker


def prompts(num_rows: int = 4, width: int = 8, **meta) -> DataProto:
    ids = torch.full((num_rows, width), 256)
    mask = torch.zeros(num_rows, width, dtype=torch.int64)
    for i in range(num_rows):
        length = 2 + i % (width - 1)
        ids[i, width - length :] = torch.arange(length) + 65 + i
        mask[i, width - length :] = 1
    return DataProto.from_dict(
        {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)},
        {"uid": [str(i // 2) for i in range(num_rows)], "rollout_id": list(range(num_rows))},
        meta,
    )


def estimated(batch: DataProto) -> DataProto:
    mask = batch.batch["response_mask"]
    generator = torch.Generator().manual_seed(0)
    return batch.union(DataProto.from_dict({"advantages": torch.randn(mask.shape, generator=generator) * mask}))


def test_weights_that_an_engine_changes_are_found_where_that_is_asked_for(lm_path, monkeypatch):
    config = policy(lm_path, rollout=replace(ROLLOUT, check_weights=True))
    worker = worker_of(config, "actor_rollout_ref")
    assert len(worker.generate_sequences(prompts(global_step=1))) == 4
    held = type(worker._rollout).checksums
    monkeypatch.setattr(type(worker._rollout), "checksums", lambda self: dict.fromkeys(held(self), 0))
    with pytest.raises(WeightMismatchError, match="differ between training and rollout"):
        worker.generate_sequences(prompts(global_step=1))


def test_actor_one_whole_step(lm_path, backend):
    """Generate, score, update; the sampler's log-probabilities are the trainer's, and the actor moves."""
    group = backend.launch_one(
        "actor", WorkerSpec(ActorRolloutRefWorker, policy(lm_path), role="actor_rollout_ref", engine=ENGINE)
    )
    group.init_model()
    batch = group.generate_sequences(prompts(global_step=1))
    record = registration_of(ActorRolloutRefWorker.generate_sequences)
    assert record is not None
    assert set(record.writes) == set(batch.columns)
    assert len(batch) == 4
    assert batch.metrics["timing_s/update_weights"].value > 0
    mask = batch.batch["response_mask"].bool()
    scored = group.compute_log_prob(batch)
    assert scored.columns == ("old_log_probs",)
    assert scored.batch["old_log_probs"].dtype == torch.float32
    torch.testing.assert_close(scored.batch["old_log_probs"], batch.batch["rollout_log_probs"], rtol=1e-4, atol=1e-4)
    assert bool((scored.batch["old_log_probs"][~mask] == 0).all())
    assert scored.metrics["actor/entropy"].weight == float(mask.sum())
    reference = group.compute_ref_log_prob(batch)
    assert torch.equal(reference.batch["ref_log_prob"], scored.batch["old_log_probs"])
    result = group.update_actor(estimated(batch.union(scored)))
    assert result.columns == ()
    expected = {"pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "loss", "grad_norm", "lr", "skipped_steps"}
    assert {name for name in result.metrics if not name.startswith("perf/")} == {f"actor/{name}" for name in expected}
    assert 0 < result.metrics["perf/cpu_memory_used_gb"].value < 2**20
    again = group.compute_log_prob(batch).batch["old_log_probs"]
    assert not torch.allclose(again, scored.batch["old_log_probs"], atol=1e-4)
    assert torch.equal(group.compute_ref_log_prob(batch).batch["ref_log_prob"], reference.batch["ref_log_prob"])
    fresh = group.generate_sequences(prompts(global_step=2))
    new = group.compute_log_prob(fresh).batch["old_log_probs"]
    torch.testing.assert_close(new, fresh.batch["rollout_log_probs"], rtol=1e-4, atol=1e-4)


def test_actor_and_rollout_run_the_same_overridden_model(lm_path):
    """`override_config` reaches both engines; with one of them on the folder's own config the gap is about 1 nat."""
    config = policy(lm_path, model=ModelConfig(path=str(lm_path), override_config={"rms_norm_eps": 0.5}))
    worker = worker_of(config, "actor_rollout")
    batch = worker.generate_sequences(prompts())
    old = worker.compute_log_prob(batch).batch["old_log_probs"]
    torch.testing.assert_close(old, batch.batch["rollout_log_probs"], rtol=1e-4, atol=1e-4)


def test_actor_gives_squared_probabilities_where_they_are_asked_for(lm_path):
    batch = worker_of(policy(lm_path), "actor_rollout").generate_sequences(prompts(global_step=1))
    asked = policy(lm_path)
    asked = replace(asked, actor=replace(asked.actor, sum_pi_squared=True))
    scored = worker_of(asked, "actor").compute_log_prob(batch)
    assert set(scored.columns) == {"old_log_probs", "sum_pi_squared"}
    squares, mask = scored.batch["sum_pi_squared"], batch.batch["response_mask"].bool()
    assert bool((squares[~mask] == 0).all())
    assert bool(((squares[mask] > 0) & (squares[mask] <= 1)).all())
    # Σπ² ≥ π² of any one token, the sampled one included.
    assert bool((squares[mask] >= scored.batch["old_log_probs"][mask].exp().square() - 1e-6).all())
    nothing = worker_of(asked, "actor").compute_log_prob(batch[:0])
    assert nothing.batch["sum_pi_squared"].shape == (0, batch.batch["response_mask"].shape[1])


def test_actor_answers_greedily_when_asked_to(lm_path):
    """The greedy pass of ReMax: no sampling whatever the configuration, the same answer at any step."""
    worker = worker_of(policy(lm_path), "actor_rollout")
    first, second = (worker.generate_sequences(prompts(global_step=step, greedy=True)) for step in (1, 2))
    assert torch.equal(first.batch["responses"], second.batch["responses"])
    assert torch.equal(first.batch["rollout_log_probs"], second.batch["rollout_log_probs"])
    sampled = worker.generate_sequences(prompts(global_step=1))
    assert not torch.equal(first.batch["responses"], sampled.batch["responses"])


def test_actor_scores_alike_for_any_micro_batch_size(lm_path):
    sizes = [
        RolloutConfig(**{"prompt_length": 8, "response_length": 6, **more})
        for more in (
            {"log_prob_micro_batch_size_per_gpu": 1},
            {"log_prob_micro_batch_size_per_gpu": 3},
            {"log_prob_max_token_len_per_gpu": 20},
        )
    ]
    batch = worker_of(policy(lm_path), "actor_rollout").generate_sequences(prompts())
    columns = [
        worker_of(policy(lm_path, rollout=rollout), "actor").compute_log_prob(batch).batch["old_log_probs"]
        for rollout in sizes
    ]
    for column in columns[1:]:
        torch.testing.assert_close(column, columns[0], rtol=1e-5, atol=1e-5)


def test_actor_applies_the_temperature_everywhere(lm_path):
    """Log-probabilities are of the temperature-scaled distribution: a ratio of 1 after scoring at any temperature."""
    config = policy(lm_path, rollout=replace(ROLLOUT, temperature=0.5))
    worker = worker_of(replace(config, actor=replace(config.actor, num_mini_batches=1)), "actor_rollout")
    batch = worker.generate_sequences(prompts())
    batch = batch.union(worker.compute_log_prob(batch))
    torch.testing.assert_close(batch.batch["old_log_probs"], batch.batch["rollout_log_probs"], rtol=1e-4, atol=1e-4)
    metrics = worker.update_actor(estimated(batch)).metrics
    assert metrics["actor/ppo_kl"].value == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("offload", [False, True])
def test_actor_keeps_state_where_the_flags_say(lm_path, offload):
    flags = PlainConfig(param_offload=offload, optimizer_offload=offload)
    config = policy(lm_path)
    config = replace(config, actor=replace(config.actor, fsdp_config=flags), ref=RefConfig(fsdp_config=flags))
    worker = worker_of(config, "actor_rollout_ref")
    engines = [worker._actor.engine, worker._ref.engine]
    lies = {"params": not offload, "optimizer": not offload}

    def parked() -> bool:
        return all(engine.resident == lies for engine in engines)

    assert parked()
    batch = worker.generate_sequences(prompts())
    assert parked()
    batch = batch.union(worker.compute_log_prob(batch)).union(worker.compute_ref_log_prob(batch))
    assert parked()
    worker.update_actor(estimated(batch))
    assert parked()
    with pytest.raises(ValueError, match="missing"):
        worker.update_actor(batch)
    assert parked()


def test_actor_parks_training_state_while_it_generates(lm_path, monkeypatch):
    """With the flags set, training state is off the device while weights stream and while tokens are sampled."""
    config = policy(lm_path)
    flags = PlainConfig(param_offload=True, optimizer_offload=True)
    worker = worker_of(replace(config, actor=replace(config.actor, fsdp_config=flags)), "actor_rollout")
    seen = []
    for method in ("load_weights", "generate"):
        own = getattr(worker._rollout, method)

        def watched(*args, own=own):
            seen.append(dict(worker._actor.engine.resident))
            return own(*args)

        monkeypatch.setattr(worker._rollout, method, watched)
    worker.generate_sequences(prompts())
    assert len(seen) >= 2
    assert all(resident == {"params": False, "optimizer": False} for resident in seen)


def test_actor_without_a_ref_role_builds_no_reference(lm_path):
    """H-65: with no KL term there is no reference model and no reference forward."""
    worker = worker_of(policy(lm_path), "actor_rollout")
    assert worker._ref is None
    with pytest.raises(RoleError, match=r"compute_ref_log_prob.*needs 'ref'"):
        worker.compute_ref_log_prob(prompts())


@pytest.mark.parametrize(
    ("role", "method"),
    [
        ("rollout", "compute_log_prob"),
        ("ref", "update_actor"),
        ("actor", "generate_sequences"),
        ("ref", "compute_log_prob"),
    ],
)
def test_actor_refuses_what_its_role_lacks(lm_path, role, method):
    with pytest.raises(RoleError, match=method):
        getattr(worker_of(policy(lm_path), role), method)(prompts())


def test_actor_says_that_init_model_is_missing(lm_path):
    with pytest.raises(RoleError, match="init_model"):
        ActorRolloutRefWorker(policy(lm_path), "actor", ENGINE).compute_log_prob(prompts())
    with pytest.raises(ConfigError, match="role"):
        ActorRolloutRefWorker(policy(lm_path), "actor_critic", ENGINE)
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.model\.path"):
        ActorRolloutRefWorker(ActorRolloutRefConfig(), "actor", ENGINE).init_model()


def test_rollout_alone_samples_with_the_weights_of_its_folder(lm_path):
    alone = worker_of(policy(lm_path), "rollout").generate_sequences(prompts())
    together = worker_of(policy(lm_path), "actor_rollout").generate_sequences(prompts())
    assert torch.equal(alone.batch["responses"], together.batch["responses"])


def test_actor_samples_by_step_and_validates_greedily(lm_path):
    config = policy(lm_path, rollout=replace(ROLLOUT, name="fake"))
    worker = worker_of(config, "actor_rollout")
    worker.generate_sequences(prompts(global_step=7))
    worker.generate_sequences(prompts(global_step=7, validate=True))
    first, second = (argument[1] for name, argument in worker._rollout.calls if name == "generate")
    assert (first.step, first.temperature, first.greedy) == (7, 0.9, False)
    assert (second.step, second.greedy) == (7, True)
    assert [name for name, _ in worker._rollout.calls if name == "sleep"] == ["sleep", "sleep"]


def test_actor_registers_the_rollout_mesh(lm_path, backend):
    spec = WorkerSpec(ActorRolloutRefWorker, policy(lm_path), role="actor_rollout", engine=ENGINE)
    group = backend.launch({"actor": spec})["actor"]
    group.init_model()
    assert group.dp_size("rollout") == 1
    assert group.dp_size("train") == 1


def test_actor_refuses_a_tensor_parallel_size_that_does_not_divide(lm_path):
    config = policy(lm_path, rollout=replace(ROLLOUT, tensor_model_parallel_size=2))
    with pytest.raises(ConfigError, match="tensor_model_parallel_size"):
        worker_of(config, "actor_rollout")


def test_actor_refuses_what_the_rollout_cannot_do_before_weights_are_loaded(lm_path, monkeypatch):
    from ostinato.workers.core import actor

    monkeypatch.setattr(actor, "build_engine", lambda *_, **__: pytest.fail("built"))
    config = policy(lm_path, rollout=replace(ROLLOUT, name="vllm", max_model_len=1 << 20))
    monkeypatch.setattr("ostinato.rollout.backends.check_installed", lambda name: None)
    with pytest.raises(ValueError, match=r"max_model_len: .* works"):
        worker_of(config, "actor_rollout")


def test_actor_checkpoint_continues_with_the_same_weights(tmp_path):
    """Its tokenizer has several chat templates, which transformers saves in a folder of their own."""
    from transformers import AutoTokenizer

    lm_path = tiny_causal_lm(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(lm_path)
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
    tokenizer.save_pretrained(lm_path)
    config = policy(lm_path)
    first = worker_of(config, "actor_rollout")
    batch = first.generate_sequences(prompts())
    batch = estimated(batch.union(first.compute_log_prob(batch)))
    first.update_actor(batch)
    first.save_checkpoint(str(tmp_path / "actor"), 1)
    first.update_actor(batch)
    second = worker_of(config, "actor")
    second.load_checkpoint(str(tmp_path / "actor"))
    second.update_actor(batch)
    assert torch.equal(
        first.compute_log_prob(batch).batch["old_log_probs"], second.compute_log_prob(batch).batch["old_log_probs"]
    )
    first.export_hf(str(tmp_path / "exported"))
    for folder in (tmp_path / "actor" / "model", tmp_path / "exported"):
        assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template
        assert (folder / "additional_chat_templates").stat().st_mode & 0o100, "a folder that can be entered"


def test_workers_report_their_mfu_where_the_peak_is_known(lm_path, make_rows, monkeypatch):
    monkeypatch.setenv("OSTINATO_DEVICE_TFLOPS", "1")
    worker = worker_of(policy(lm_path), "actor_rollout")
    batch = worker.generate_sequences(prompts())
    scored = worker.compute_log_prob(batch)
    updated = worker.update_actor(estimated(batch.union(scored)))
    assert 0 < scored.metrics["perf/mfu/actor_infer"].value < 1
    assert 0 < updated.metrics["perf/mfu/actor"].value < 1
    critic = CriticWorker(CriticConfig(model=ModelConfig(path=str(lm_path))), ENGINE)
    critic.init_model()
    assert 0 < critic.update_critic(make_rows(2)).metrics["perf/mfu/critic"].value < 1


def test_update_reports_the_kl_coefficient(lm_path):
    config = policy(lm_path)
    config = replace(config, actor=replace(config.actor, use_kl_loss=True, kl_loss_coef=0.3))
    worker = worker_of(config, "actor_rollout_ref")
    batch = worker.generate_sequences(prompts())
    batch = batch.union(worker.compute_log_prob(batch)).union(worker.compute_ref_log_prob(batch))
    metrics = worker.update_actor(estimated(batch)).metrics
    assert metrics["actor/kl_coef"].value == 0.3
    assert "actor/kl_loss" in metrics


def test_scoring_takes_a_rank_without_rows(lm_path, make_rows):
    worker = worker_of(policy(lm_path), "actor_rollout_ref")
    empty = make_rows(2)[[]]
    assert worker.compute_log_prob(empty).batch["old_log_probs"].shape == (0, 6)
    assert worker.compute_ref_log_prob(empty).batch["ref_log_prob"].shape == (0, 6)


@pytest.mark.parametrize("worker", [ActorRolloutRefWorker, CriticWorker, RewardModelWorker])
def test_workers_declare_real_columns(worker):
    methods = [registration_of(getattr(worker, name)) for name in dir(worker)]
    records = [record for record in methods if record is not None]
    assert records
    for record in records:
        assert set(record.reads) | set(record.writes) <= COLUMNS.keys()


def test_external_lib_is_imported_before_the_model(lm_path, tmp_path, monkeypatch):
    (tmp_path / "core_test_extension.py").write_text("LOADED = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = policy(lm_path)
    worker_of(replace(config, model=replace(config.model, external_lib="core_test_extension")), "actor")
    import sys

    assert sys.modules["core_test_extension"].LOADED


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_tiny_models_have_a_tokenizer_and_a_chat_template(tmp_path, architecture):
    from transformers import AutoTokenizer

    path = tiny_causal_lm(tmp_path / "lm", architecture=architecture)
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = "Was ist 2 + 3? ✓"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == EOS
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<bos>user\nhi<eos><bos>assistant\n"
    assert np.max(ids) < EOS


def test_scoring_and_training_name_the_column_that_is_missing_and_who_makes_it(lm_path, make_rows):
    group = LocalBackend().launch_one("actor", WorkerSpec(ActorRolloutRefWorker, policy(lm_path), "actor", ENGINE))
    rows = make_rows(2)
    with pytest.raises(
        MissingColumnError, match=r"'compute_log_prob': the batch lacks 'response_mask' \(from rollout\)"
    ):
        group.compute_log_prob(rows.drop(["response_mask"]))
    with pytest.raises(MissingColumnError, match=r"'update_actor': .*'advantages' \(from estimate\)"):
        group.update_actor(rows.drop(["advantages"]))
