from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch

from ostinato.rollout import RolloutConfig, SamplingParams, TensorSpec, build_rollout
from ostinato.rollout.backends.fake import FakeRollout
from ostinato.rollout.errors import EngineStateError, WeightMismatchError
from ostinato.rollout.reshard import PHASES, reshard, sync_weights
from ostinato.rollout.testing import ModuleWeights, make_prompts, save_tiny_model

F32 = torch.float32
CONFIG = RolloutConfig(name="fake", prompt_length=4, response_length=4)
PROMPTS = make_prompts([[5, 6]])


class Source:
    """A scripted weight source."""

    def __init__(self, sent: dict[str, torch.Tensor], specs: dict[str, TensorSpec] | None = None):
        self._sent = sent
        self._specs = specs or {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in sent.items()}

    def specs(self):
        return self._specs

    def weights(self):
        yield from self._sent.items()


WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4), "c": torch.zeros(1)}


def fake(**options) -> FakeRollout:
    specs = {name: TensorSpec(tuple(t.shape), F32) for name, t in WEIGHTS.items()}
    return FakeRollout(CONFIG, **{"specs": specs, **options})


def names(rollout: FakeRollout) -> list[str]:
    return [f"{name}:{argument}" if name == "wake" else name for name, argument in rollout.calls]


def test_reshard_calls_come_in_the_order_that_fits_in_memory():
    """H-50: weights wake, sync, the copy goes, training state parks, only then the cache wakes; on exit sleep first."""
    rollout = fake()
    log = rollout.calls
    with reshard(
        Source(WEIGHTS), rollout, park=lambda: log.append(("park", None)), restore=lambda: log.append(("restore", None))
    ) as engine:
        assert engine is rollout
        rollout.generate(PROMPTS, SamplingParams())
    assert names(rollout) == [
        "wake:weights", "load_weights", "finish_load", "park", "wake:kv_cache", "generate", "sleep", "restore",
    ]  # fmt: skip


def test_reshard_names_its_phases_when_they_have_ended():
    rollout = fake()
    log = rollout.calls
    with reshard(Source(WEIGHTS), rollout, observe=lambda phase: log.append((phase, "ended"))):
        rollout.generate(PROMPTS, SamplingParams())
    assert [name for name, detail in log if detail == "ended"] == list(PHASES)
    assert [name for name, _ in log] == [
        "wake", "wake_weights", "load_weights", "finish_load", "sync", "park", "wake", "wake_kv_cache", "generate",
        "generate", "sleep", "sleep",
    ]  # fmt: skip
    ended: list[str] = []
    with pytest.raises(OSError, match="stop"), reshard(Source(WEIGHTS), rollout, observe=ended.append):
        raise OSError("stop")
    assert ended == list(PHASES[:4]), "what an error broke off has not ended"


def test_reshard_moves_values_in_the_rollouts_dtype():
    rollout = fake(specs={name: TensorSpec(tuple(t.shape), torch.bfloat16) for name, t in WEIGHTS.items()})
    with reshard(Source(WEIGHTS), rollout, check=True):
        assert {name: t.dtype for name, t in rollout.weights.items()} == dict.fromkeys(WEIGHTS, torch.bfloat16)
        assert rollout.weights["a"].tolist() == WEIGHTS["a"].tolist()


def test_reshard_lets_go_of_a_weight_before_the_next_is_made():
    """H-50, its kind: beside the buckets there is one weight at a time."""

    class Gathers(Source):
        def weights(self):
            last = None
            for name, tensor in self._sent.items():
                assert last is None or last() is None, f"a weight before {name} is still there"
                full = tensor.clone()
                last = weakref.ref(full)
                yield name, full
                del full

    with reshard(Gathers(WEIGHTS), fake(), check=True) as rollout:
        assert set(rollout.weights) == set(WEIGHTS)


def test_reshard_frees_the_copy_before_the_cache_wakes():
    """H-50: two buckets at most while weights move, none afterwards."""
    alive: list[weakref.ref] = []
    rollout = fake()
    load = rollout.load_weights

    def watch(bucket):
        alive.extend(weakref.ref(tensor) for _, tensor in bucket)
        load(bucket)

    rollout.load_weights = watch
    with reshard(Source(WEIGHTS), rollout):
        gc.collect()
        assert alive
        assert all(ref() is None for ref in alive)


@pytest.mark.parametrize(
    "sent",
    [
        {"a": WEIGHTS["a"], "b": WEIGHTS["b"]},
        {**WEIGHTS, "d": torch.ones(1)},
        {**WEIGHTS, "b": torch.ones(2, 2)},
        {},
    ],
)
def test_reshard_refuses_before_the_first_byte(sent):
    """H-52, H-53: names left over on either side and shapes of shards are found before anything moves."""
    rollout = fake()
    restored = []
    with (
        pytest.raises(WeightMismatchError, match="nothing was moved"),
        reshard(Source(sent), rollout, restore=lambda: restored.append(1)),
    ):
        raise AssertionError("the body must not run")
    assert names(rollout) == ["wake:weights", "sleep"]
    assert restored == [1]


@pytest.mark.parametrize(
    ("sent", "match"),
    [
        ({"a": WEIGHTS["a"], "b": WEIGHTS["b"]}, "ended without c"),
        ({"a": WEIGHTS["a"][:1]}, "full tensors"),
        ({**WEIGHTS, "d": torch.ones(1)}, "without naming it"),
        ({"a": WEIGHTS["a"].to(torch.int8)}, r"specs torch\.float32, sent torch\.int8"),
    ],
)
def test_reshard_refuses_a_source_that_sends_something_else_than_its_specs(sent, match):
    """H-53: also a source whose specs are right and whose tensors are shards; the engine stays unusable."""
    rollout = fake()
    with pytest.raises(WeightMismatchError, match=match), reshard(Source(sent, Source(WEIGHTS).specs()), rollout):
        raise AssertionError("the body must not run")
    assert "finish_load" not in names(rollout)
    assert names(rollout)[-1] == "sleep"
    with pytest.raises(EngineStateError):
        rollout.generate(PROMPTS, SamplingParams())


def test_reshard_refuses_a_name_sent_twice():
    class Twice(Source):
        def weights(self):
            yield from WEIGHTS.items()
            yield "a", WEIGHTS["a"]

    with pytest.raises(WeightMismatchError, match="twice"), reshard(Twice(WEIGHTS), fake()):
        pass


def test_generate_is_refused_without_a_whole_sync():
    """H-49: sleep drops the weights; waking alone is not enough, in any order."""
    rollout = fake()
    for wakes in ((), ("weights",), ("weights", "kv_cache")):
        for tag in wakes:
            rollout.wake(tag)
        with pytest.raises(EngineStateError, match="reshard"):
            rollout.generate(PROMPTS, SamplingParams())
        rollout.sleep()
    with reshard(Source(WEIGHTS), rollout):
        rollout.generate(PROMPTS, SamplingParams())
        rollout.load_weights([("a", WEIGHTS["a"])])
        with pytest.raises(EngineStateError, match="1 of 3"):
            rollout.generate(PROMPTS, SamplingParams())
    with pytest.raises(EngineStateError, match="asleep"):
        rollout.generate(PROMPTS, SamplingParams())


def test_a_sync_that_was_broken_off_lends_nothing_to_the_next():
    """H-49, its kind: without sleep in between, what came before the error would stand in for the new weights."""
    rollout = fake()
    rollout.wake("weights")
    rollout.load_weights([(name, WEIGHTS[name] + 1) for name in "ab"])
    for _ in range(2):
        with pytest.raises(EngineStateError, match=r"a, b came before; `sleep` gives up"):
            sync_weights(Source(WEIGHTS), rollout)
    rollout.sleep()
    rollout.wake("weights")
    for add in (0, 1):  # a whole load may be followed by another one
        sync_weights(Source({name: tensor + add for name, tensor in WEIGHTS.items()}), rollout, check=True)
    assert rollout.weights["a"][0, 0] == 1


def test_engine_refuses_calls_out_of_order():
    rollout = fake()
    with pytest.raises(EngineStateError):
        rollout.wake("kv_cache")
    with pytest.raises(EngineStateError):
        rollout.load_weights([("a", WEIGHTS["a"])])
    with pytest.raises(EngineStateError):
        rollout.wake("everything")
    rollout.wake("weights")
    with pytest.raises(WeightMismatchError):
        rollout.load_weights([("z", WEIGHTS["a"])])
    with pytest.raises(EngineStateError, match="3 of 3 never came"):
        rollout.finish_load()
    rollout.close()
    with pytest.raises(EngineStateError, match="closed"):
        rollout.wake("weights")


@pytest.mark.parametrize("where", ["park", "body", "wake", "load", "finish", "interrupt"])
def test_reshard_cleans_up_after_an_error_anywhere(where):
    rollout = fake()
    log = rollout.calls
    error = KeyboardInterrupt() if where == "interrupt" else OSError(where)

    def fail(*_):
        raise error

    if where == "load":
        rollout.load_weights = fail
    if where == "finish":
        rollout.finish_load = fail
    if where == "wake":
        real = rollout.wake
        rollout.wake = lambda tag: fail() if tag == "kv_cache" else real(tag)
    park = fail if where == "park" else lambda: log.append(("park", None))
    with (
        pytest.raises(type(error)) as caught,
        reshard(Source(WEIGHTS), rollout, park=park, restore=lambda: log.append(("restore", None))),
    ):
        fail()
    assert caught.value is error
    assert names(rollout)[-2:] == ["sleep", "restore"]
    assert not getattr(error, "__notes__", [])
    with pytest.raises(EngineStateError):
        rollout.generate(PROMPTS, SamplingParams())


def test_reshard_restores_even_where_sleep_fails(caplog):
    """The first error is the one that is raised; what fails on the way back becomes a note of it, and is logged."""
    rollout = fake()
    restored = []

    def fail():
        raise OSError("sleep")

    rollout.sleep = fail
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(KeyError) as caught,
        reshard(Source(WEIGHTS), rollout, restore=lambda: restored.append(1)),
    ):
        raise KeyError("body")
    assert restored == [1]
    assert "OSError('sleep')" in caught.value.__notes__[0]
    assert "clean-up failed" in caplog.text


def test_reshard_raises_what_fails_on_leaving():
    rollout = fake()

    def fail():
        raise OSError("restore")

    with pytest.raises(OSError, match="restore"), reshard(Source(WEIGHTS), rollout, restore=fail):
        pass
    rollout.sleep = fail
    with pytest.raises(ExceptionGroup) as caught, reshard(Source(WEIGHTS), rollout, restore=fail):
        pass
    assert len(caught.value.exceptions) == 2


def test_check_finds_a_loader_that_changes_a_weight():
    """H-53: weights already turned into another layout show in the checksums of both sides."""
    rollout = fake()
    load = rollout.load_weights

    def transposing(bucket):
        load([(name, tensor.t().reshape(tensor.shape) if name == "a" else tensor) for name, tensor in bucket])

    rollout.load_weights = transposing
    with reshard(Source(WEIGHTS), rollout):
        pass
    with pytest.raises(WeightMismatchError, match="differ") as caught, reshard(Source(WEIGHTS), rollout, check=True):
        raise AssertionError("the body must not run")
    assert caught.value.unexpected == ("a",)


def test_check_needs_an_engine_that_can_sum():
    class Blind:
        def __init__(self):
            self._inner = fake()

        def __getattr__(self, name):
            if name == "checksums":
                raise AttributeError(name)
            return getattr(self._inner, name)

    with pytest.raises(EngineStateError, match="checksums"), reshard(Source(WEIGHTS), Blind(), check=True):
        pass


@pytest.mark.parametrize("source_tied", [True, False])
@pytest.mark.parametrize("tied_names", [True, False])
@pytest.mark.parametrize("check", [True, False])
def test_sync_into_a_tied_model(source_tied, tied_names, check, tmp_path):
    """A pair that is one memory in the rollout must be one value in training."""
    save_tiny_model(tmp_path / "tied")
    source = ModuleWeights(save_tiny_model(tmp_path / "source", tied=source_tied), tied_names=tied_names)
    config = RolloutConfig(dtype="float32", prompt_length=4, response_length=4)
    rollout = build_rollout(config, model_path=tmp_path / "tied")
    rollout.wake("weights")
    if source_tied:
        sync_weights(source, rollout, bucket_megabytes=1, check=check)
    else:
        with pytest.raises(WeightMismatchError, match="one tensor in the rollout engine"):
            sync_weights(source, rollout, bucket_megabytes=1, check=check)


def test_sync_of_a_tied_source_into_an_untied_model_is_refused(tmp_path):
    source = ModuleWeights(save_tiny_model(tmp_path / "source"))
    save_tiny_model(tmp_path / "untied", tied=False)
    rollout = build_rollout(RolloutConfig(dtype="float32"), model_path=tmp_path / "untied")
    with pytest.raises(WeightMismatchError) as caught, reshard(source, rollout):
        pass
    assert caught.value.missing == ("lm_head.weight",)
