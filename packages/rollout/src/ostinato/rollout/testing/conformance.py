"""What every rollout engine must do, as plain callables: `check_<subject>(make_rollout, setting)`.

A backend's tests call `run_conformance`, or parametrise over `checks(setting)` for one test a check. The oracle is a
float32 transformers forward pass of a tiny model that the suite writes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ostinato.protocol import DataProto, columns
from ostinato.rollout.base import Checksums
from ostinato.rollout.config import SamplingParams
from ostinato.rollout.errors import EngineStateError, PromptError
from ostinato.rollout.reshard import reshard
from ostinato.rollout.testing.models import ModuleWeights, make_prompts, oracle, responses, tensors
from ostinato.rollout.testing.setting import MakeRollout, Setting, kept_engines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ostinato.rollout.base import Rollout

_LISTS = [[5, 6], [7, 8, 9, 10, 11, 12, 13], [300], [44, 45, 46, 47], [5, 6]]
_GREEDY = SamplingParams(temperature=0.0, eos_token_ids=())
_DRAWN = SamplingParams(temperature=1.0, eos_token_ids=())


@contextmanager
def _ready(make: MakeRollout, setting: Setting, *, tied: bool = True, **changes: Any) -> Iterator[Rollout]:
    path, module = setting.model(tied=tied)
    with reshard(ModuleWeights(module), make(setting.config(**changes), path), bucket_megabytes=1) as rollout:
        yield rollout


def _raises(error: type[Exception], call: Callable[[], Any], what: str) -> None:
    try:
        call()
    except error:
        return
    except Exception as other:
        raise AssertionError(f"expected {error.__name__}, got {other!r}: {what}") from other
    raise AssertionError(f"expected {error.__name__}: {what}")


def check_specs(make: MakeRollout, setting: Setting) -> None:
    """The engine wants the model's own names and full shapes."""
    path, module = setting.model()
    specs = make(setting.config(), path).specs()
    for name, tensor in module.named_parameters():
        assert name in specs, f"{name} is not in specs()"
        assert specs[name].shape == tuple(tensor.shape), name


def check_columns(make: MakeRollout, setting: Setting) -> None:
    """Shapes, dtypes, masks and positions of the design, rows in prompt order."""
    prompts = make_prompts(_LISTS, width=8, rollout_ids=[3, 1, 4, 11, 5])
    with _ready(make, setting) as rollout:
        rows = rollout.generate(prompts, _DRAWN)
    assert set(rows.columns) == {*columns.ROLLOUT, "uid", "rollout_id"}
    t = tensors(rows)
    valid = t["attention_mask"][:, 8:]
    assert t["responses"].shape == (5, 12)
    for name in ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask"):
        assert t[name].dtype == torch.int64, name
    assert t["rollout_log_probs"].dtype == torch.float32
    assert torch.equal(t["prompts"], tensors(prompts)["input_ids"]), "prompts come back as they went in"
    assert torch.equal(t["input_ids"], torch.cat([t["prompts"], t["responses"]], -1))
    assert torch.equal(t["attention_mask"][:, :8], tensors(prompts)["attention_mask"])
    assert torch.equal(t["response_mask"], valid), "every response token was sampled"
    assert bool((valid[:, :-1] >= valid[:, 1:]).all()), "responses are right-padded"
    assert torch.equal(t["position_ids"][:, :8], tensors(prompts)["position_ids"])
    assert bool((t["position_ids"][:, 8:] == t["position_ids"][:, 7:-1] + 1).all()), "positions continue"
    assert bool(torch.where(valid == 1, t["rollout_log_probs"] <= 0, t["rollout_log_probs"] == 0).all())
    assert rows.non_tensor_batch["uid"].tolist() == prompts.non_tensor_batch["uid"].tolist()
    assert [int(i) for i in rows.non_tensor_batch["rollout_id"]] == [3, 1, 4, 11, 5]
    assert set(rows.non_tensor_batch["finish_reason"].tolist()) <= {"stop", "length", "abort"}


def check_refuses_before_sync(make: MakeRollout, setting: Setting) -> None:
    """H-49: no generation while asleep, before a whole load, after part of one, or after sleep."""
    path, module = setting.model()
    rollout = make(setting.config(), path)
    prompts = make_prompts(_LISTS[:1])

    def refused(what: str) -> None:
        _raises(EngineStateError, lambda: rollout.generate(prompts, _GREEDY), f"generate {what}")

    refused("while asleep")
    rollout.wake("weights")
    refused("before any weight came")
    name, tensor = next(iter(module.named_parameters()))
    first = [(name, tensor.detach().to(rollout.specs()[name].dtype))]
    rollout.load_weights(first)
    refused("after a part of the weights")
    _raises(EngineStateError, lambda: rollout.load_weights(first), "a weight twice in a load")
    _raises(EngineStateError, rollout.finish_load, "finish_load with weights missing")
    rollout.wake("kv_cache")
    refused("with a load that never ended")
    rollout.sleep()
    rollout.sleep()
    with reshard(ModuleWeights(module), rollout):
        assert len(rollout.generate(prompts, _GREEDY)) == 1
    refused("after sleep")
    rollout.wake("weights")
    rollout.wake("kv_cache")
    refused("woken without a new load")
    rollout.sleep()


def check_empty_batch(make: MakeRollout, setting: Setting) -> None:
    """No prompts give no rows, with every column there."""
    with _ready(make, setting) as rollout:
        one = rollout.generate(make_prompts(_LISTS[:1], width=8), _DRAWN)
        none = rollout.generate(make_prompts([], width=8), _DRAWN)
    assert len(none) == 0
    assert set(none.columns) == set(one.columns)
    assert {n: t.shape[1:] for n, t in tensors(none).items()} == {n: t.shape[1:] for n, t in tensors(one).items()}


def check_prompt_lengths(make: MakeRollout, setting: Setting) -> None:
    """Prompts of 1..P tokens answer together as each alone, in float32."""
    lists = [list(range(20, 20 + n)) for n in range(1, 9)]
    with _ready(make, setting) as rollout:
        together = rollout.generate(make_prompts(lists, width=8), _GREEDY)
        alone = [rollout.generate(make_prompts([tokens], width=8), _GREEDY) for tokens in lists]
    for i, row in enumerate(alone):
        assert responses(together)[i] == responses(row)[0], f"prompt of {i + 1} tokens"


def check_left_padding(make: MakeRollout, setting: Setting) -> None:
    """H-48: neither the width of the padding nor what stands in it changes an answer; bad padding is refused."""
    with _ready(make, setting) as rollout:
        wide = rollout.generate(make_prompts(_LISTS, width=8, pad_token_id=0), _GREEDY)
        tight = rollout.generate(make_prompts(_LISTS), _GREEDY)
        assert responses(wide) == responses(tight)
        for pad in (77, -1, 1 << 20):
            other = rollout.generate(make_prompts(_LISTS, width=8, pad_token_id=pad), _GREEDY)
            assert responses(wide) == responses(other), f"padded with {pad}"
        empty = make_prompts([[5], []], width=8)
        _raises(PromptError, lambda: rollout.generate(empty, _GREEDY), "a prompt without tokens")
        right = make_prompts([[5, 6, 7]])
        assert right.batch is not None
        right.batch["attention_mask"][0, 2] = 0
        _raises(PromptError, lambda: rollout.generate(right, _GREEDY), "a prompt padded on the right")


def check_unknown_tokens(make: MakeRollout, setting: Setting) -> None:
    """A prompt with a token that the model does not have is refused, and the next one is answered."""
    with _ready(make, setting) as rollout:
        known = responses(rollout.generate(make_prompts([[5, 511]]), _GREEDY))
        for token in (512, -1, 1 << 40):
            strange = make_prompts([[5, 511], [5, token]])
            _raises(PromptError, lambda s=strange: rollout.generate(s, _GREEDY), f"a prompt with the token {token}")
        assert responses(rollout.generate(make_prompts([[5, 511]]), _GREEDY)) == known


def check_end_tokens(make: MakeRollout, setting: Setting) -> None:
    """Any token of the list ends a response and belongs to it, whatever else is named; `ignore_eos` goes on."""
    prompts = make_prompts(_LISTS, width=8)
    with _ready(make, setting) as rollout:
        free = responses(rollout.generate(prompts, _GREEDY))
        ends = (free[0][2], free[1][4])
        expected = [row[: 1 + next((j for j, t in enumerate(row) if t in ends), len(row))] for row in free]
        ended = rollout.generate(prompts, replace(_GREEDY, eos_token_ids=(-1, *ends, 1 << 20)))
        ignored = rollout.generate(prompts, replace(_GREEDY, eos_token_ids=ends, ignore_eos=True))
    assert responses(ended) == expected
    reasons = ["stop" if row[-1] in ends else "length" for row in expected]
    assert ended.non_tensor_batch["finish_reason"].tolist() == reasons
    assert responses(ignored) == free
    assert ignored.non_tensor_batch["finish_reason"].tolist() == ["length"] * len(free)


def check_samples(make: MakeRollout, setting: Setting) -> None:
    """H-44: samples of one prompt differ by `rollout_id`, step and seed, and repeat exactly for equal ones."""
    prompts = make_prompts([[5, 6, 7]] * 4, rollout_ids=[0, 1, 2, 3])
    with _ready(make, setting) as rollout:
        first = responses(rollout.generate(prompts, _DRAWN))
        again = responses(rollout.generate(prompts, _DRAWN))
        step = responses(rollout.generate(prompts, replace(_DRAWN, step=1)))
        seed = responses(rollout.generate(prompts, replace(_DRAWN, seed=1)))
        elsewhere = make_prompts([[5, 6, 7]] * 4, rollout_ids=[4, 5, 6, 7])
        other_rank = responses(rollout.generate(elsewhere, _DRAWN))
    assert first == again
    everything = [tuple(row) for rows in (first, step, seed, other_rank) for row in rows]
    assert len(set(everything)) == len(everything), "two streams gave one sample"


def check_split(make: MakeRollout, setting: Setting) -> None:
    """The same rows in another batch, or under another order, give the same samples."""
    prompts = make_prompts(_LISTS, width=8)
    with _ready(make, setting) as rollout:
        whole = rollout.generate(prompts, _DRAWN)
        parts = DataProto.concat([rollout.generate(part, _DRAWN) for part in prompts.chunk(3)])
        back = rollout.generate(prompts.reorder([4, 3, 2, 1, 0]), _DRAWN).reorder([4, 3, 2, 1, 0])
    assert responses(whole) == responses(parts) == responses(back)
    torch.testing.assert_close(
        tensors(whole)["rollout_log_probs"], tensors(parts)["rollout_log_probs"], atol=setting.atol, rtol=0
    )


def check_limits(make: MakeRollout, setting: Setting) -> None:
    """H-45: context 8, at most 6 tokens, prompts of 2, 3, 4: lengths 6, 5, 4, all cut. `max_tokens` cuts as well."""
    lists = [[5, 6], [5, 6, 7], [5, 6, 7, 8]]
    with _ready(make, setting, prompt_length=4, response_length=6, max_model_len=8) as rollout:
        cut = rollout.generate(make_prompts(lists), _DRAWN)
        short = rollout.generate(make_prompts(lists), replace(_DRAWN, max_tokens=2))
        full = make_prompts([list(range(5, 13))])
        _raises(PromptError, lambda: rollout.generate(full, _DRAWN), "a prompt that fills the context")
    assert tensors(cut)["response_mask"].sum(-1).tolist() == [6, 5, 4]
    assert tensors(cut)["responses"].shape == (3, 6)
    assert cut.non_tensor_batch["finish_reason"].tolist() == ["length"] * 3
    assert tensors(short)["response_mask"].sum(-1).tolist() == [2, 2, 2]
    assert tensors(short)["responses"].shape == (3, 6)


def check_aborted_rows(make: MakeRollout, setting: Setting) -> None:
    """H-46: the engine aborts 1 of 4; that row is marked and has no trainable token, the others are untouched."""
    assert setting.abort is not None
    prompts = make_prompts([[5, 6], [7], [8], [9]], rollout_ids=[0, 1, 2, 3])
    with _ready(make, setting) as rollout:
        whole = rollout.generate(prompts, _DRAWN)
        setting.abort(rollout, [2])
        rows = rollout.generate(prompts, _DRAWN)
        setting.abort(rollout, [])
    assert (rows.non_tensor_batch["finish_reason"] == "abort").tolist() == [False, False, True, False]
    assert int(tensors(rows)["response_mask"][2].sum()) == 0
    assert bool((tensors(rows)["rollout_log_probs"][2] == 0).all())
    others = np.asarray([0, 1, 3])
    assert [responses(rows)[i] for i in others] == [responses(whole)[i] for i in others]


def check_greedy(make: MakeRollout, setting: Setting) -> None:
    """Greedy tokens are those of an argmax loop, whichever of the two switches asks for it."""
    _, module = setting.model()
    prompts = make_prompts(_LISTS, width=8)
    with _ready(make, setting) as rollout:
        rows = rollout.generate(prompts, _GREEDY)
        switched = rollout.generate(prompts, replace(_DRAWN, temperature=0.5, do_sample=False))
    for each, temperature in ((rows, 1.0), (switched, 0.5)):
        log_probs, regret = oracle(module, each, temperature)
        assert float(regret.max()) <= setting.atol, f"a token is {float(regret.max()):.2g} nats below the likeliest"
        torch.testing.assert_close(tensors(each)["rollout_log_probs"], log_probs, atol=setting.atol, rtol=0)


def check_log_probs(make: MakeRollout, setting: Setting) -> None:
    """H-47: log-probabilities are those of softmax(logits / T), whatever restricts the draw."""
    _, module = setting.model()
    prompts = make_prompts(_LISTS, width=8)
    with _ready(make, setting) as rollout:
        for temperature, top_p in ((1.0, 1.0), (0.5, 1.0), (1.7, 1.0), (1.0, 0.8)):
            rows = rollout.generate(prompts, replace(_DRAWN, temperature=temperature, top_p=top_p))
            log_probs, _ = oracle(module, rows, temperature)
            torch.testing.assert_close(tensors(rows)["rollout_log_probs"], log_probs, atol=setting.atol, rtol=0)


def check_new_weights(make: MakeRollout, setting: Setting) -> None:
    """H-51: after an update the answers are the new weights' own, the head of tied and untied models included."""
    prompts = make_prompts(_LISTS, width=8)
    for tied in (True, False):
        path, _ = setting.model(tied=tied)
        rollout = make(setting.config(), path)
        answers = []
        for seed in (0, 1, 0):
            _, module = setting.model(tied=tied, seed=seed)
            for tied_names in (False, True):
                source = ModuleWeights(module, tied_names=tied_names)
                with reshard(source, rollout, bucket_megabytes=1):
                    rows = rollout.generate(prompts, _GREEDY)
                log_probs, regret = oracle(module, rows, 1.0)
                assert float(regret.max()) <= setting.atol, "the answer is not that of the new weights"
                torch.testing.assert_close(tensors(rows)["rollout_log_probs"], log_probs, atol=setting.atol, rtol=0)
            answers.append(responses(rows))
        assert answers[0] == answers[2]
        assert answers[0] != answers[1], "new weights changed nothing"


def check_stale_cache(make: MakeRollout, setting: Setting) -> None:
    """H-51: of prompts that fill many blocks of the cache nothing is kept when the weights change."""
    rollout = make(setting.config(prompt_length=300, response_length=2, max_num_seqs=8), setting.model()[0])
    prompts = make_prompts([[5 + place % 500 for place in range(length)] for length in (300, 300, 290)])
    for seed in (0, 1, 0):
        _, module = setting.model(seed=seed)
        with reshard(ModuleWeights(module), rollout):
            for _ in range(2):  # the second time from the cache, where there is one
                rows = rollout.generate(prompts, _GREEDY)
                log_probs, regret = oracle(module, rows, 1.0)
                assert float(regret.max()) <= setting.atol, "the answer is not that of the new weights"
                torch.testing.assert_close(tensors(rows)["rollout_log_probs"], log_probs, atol=setting.atol, rtol=0)


def check_checksums(make: MakeRollout, setting: Setting) -> None:
    """The engine holds what was sent, at its first load and at a repeated one, tied or not."""
    for tied in (True, False):
        path, _ = setting.model(tied=tied)
        rollout = make(setting.config(), path)
        for seed in (0, 1):
            _, module = setting.model(tied=tied, seed=seed)
            with reshard(ModuleWeights(module), rollout, bucket_megabytes=1, check=True):
                pass


def check_abandoned_load(make: MakeRollout, setting: Setting) -> None:
    """A load that is given up half way is followed by a whole one; in a new engine before its first whole load too."""
    path, module = setting.model()
    rollout = make(setting.config(), path)
    name, tensor = next(iter(module.named_parameters()))
    for _ in range(2):
        for _ in range(2):
            rollout.wake("weights")
            rollout.load_weights([(name, tensor.detach() * 0)])
            rollout.sleep()
        with reshard(ModuleWeights(module), rollout, check=True):
            pass


def check_close(make: MakeRollout, setting: Setting) -> None:
    """An engine that is closed in the middle of a load: leaving is silent, and every call after it is refused."""
    path, module = setting.model()
    source, prompts = ModuleWeights(module), make_prompts(_LISTS[:1])
    rollout = make(setting.config(max_num_seqs=7), path)
    name, tensor = next(iter(module.named_parameters()))
    with reshard(source, rollout):
        rollout.load_weights([(name, tensor.detach())])
        rollout.close()
        rollout.close()
    rollout.sleep()
    _raises(EngineStateError, lambda: rollout.wake("weights"), "wake of a closed engine")
    _raises(EngineStateError, lambda: rollout.load_weights([(name, tensor.detach())]), "a load into a closed engine")
    _raises(EngineStateError, rollout.finish_load, "finish_load of a closed engine")
    _raises(EngineStateError, lambda: rollout.generate(prompts, _GREEDY), "generate of a closed engine")
    if isinstance(rollout, Checksums):
        _raises(EngineStateError, rollout.checksums, "checksums of a closed engine")


def check_distribution(make: MakeRollout, setting: Setting) -> None:
    """512 draws of one token: each token's count within 5 standard deviations of what its probability says."""
    _, module = setting.model()
    prompts = make_prompts([[5, 6, 7]] * 512)
    with _ready(make, setting) as rollout:
        tokens = tensors(rollout.generate(prompts, replace(_DRAWN, max_tokens=1)))["responses"][:, 0]
    with torch.no_grad():
        probabilities = module(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].float().softmax(-1)
    counts = torch.bincount(tokens, minlength=len(probabilities))
    spread = (512 * probabilities * (1 - probabilities)).sqrt() + 1
    assert float(((counts - 512 * probabilities).abs() / spread).max()) < 5


Check = Callable[[MakeRollout, Setting], None]

PROTOCOL_CHECKS: tuple[Check, ...] = (
    check_specs,
    check_columns,
    check_refuses_before_sync,
    check_empty_batch,
    check_prompt_lengths,
    check_left_padding,
    check_unknown_tokens,
    check_end_tokens,
    check_samples,
    check_split,
    check_limits,
    check_close,
)
MODEL_CHECKS: tuple[Check, ...] = (check_greedy, check_log_probs, check_new_weights, check_stale_cache)
ENGINE_CHECKS: tuple[Check, ...] = (check_checksums, check_abandoned_load, check_distribution)
"""Of engines with memory of their own. The engine is a `Checksums`; two of them are there at a time."""


def checks(setting: Setting) -> tuple[Check, ...]:
    """The checks that apply to an engine."""
    aborts: Sequence[Check] = (check_aborted_rows,) if setting.abort is not None else ()
    return (*PROTOCOL_CHECKS, *aborts, *(MODEL_CHECKS if setting.has_model else ()))


def run_conformance(make_rollout: MakeRollout, setting: Setting, *, exclude: Collection[str] = ()) -> list[str]:
    """Run every check that applies; engines are built once for each configuration and model, and reused.

    Args:
        make_rollout: builds the engine under test.
        setting: how to examine it.
        exclude: names of checks to leave out, such as "check_split".

    Returns:
        Names of the checks that ran.

    Raises:
        AssertionError: of the first check that failed.
    """
    chosen = [check for check in checks(setting) if check.__name__ not in exclude]  # pyright: ignore[reportFunctionMemberAccess]
    with kept_engines(make_rollout) as make:
        for check in chosen:
            check(make, setting)
    return [check.__name__ for check in chosen]  # pyright: ignore[reportFunctionMemberAccess]
