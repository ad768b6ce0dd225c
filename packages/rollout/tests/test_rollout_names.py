from __future__ import annotations

import pytest
import torch

from ostinato.rollout import TensorSpec
from ostinato.rollout.errors import WeightMismatchError
from ostinato.rollout.names import reconcile, tied_groups

F32 = torch.float32
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def specs(**ties: str | None) -> dict[str, TensorSpec]:
    shapes = {EMBED: (8, 4), HEAD: (8, 4), NORM: (4,)}
    return {name: TensorSpec(shapes[name], F32, tie) for name, tie in ties.items()}


UNTIED = specs(**{EMBED: None, NORM: None, HEAD: None})
TIED = specs(**{EMBED: None, NORM: None, HEAD: EMBED})
ALONE = specs(**{EMBED: None, NORM: None})
HEAD_ALONE = specs(**{NORM: None, HEAD: None})


@pytest.mark.parametrize("source", [UNTIED, TIED, ALONE, HEAD_ALONE])
def test_reconcile_accepts_any_name_of_a_tied_pair(source):
    assert reconcile(source, TIED) == {name: name for name in source}


def test_reconcile_drops_a_declared_twin_that_the_rollout_has_no_name_for():
    assert reconcile(TIED, ALONE) == {EMBED: EMBED, NORM: NORM}


def test_reconcile_refuses_an_undeclared_head_that_the_rollout_has_no_name_for():
    with pytest.raises(WeightMismatchError) as caught:
        reconcile(UNTIED, ALONE)
    assert caught.value.unexpected == (HEAD,)


def test_reconcile_refuses_a_tied_source_for_an_untied_rollout():
    with pytest.raises(WeightMismatchError, match="tie_word_embeddings") as caught:
        reconcile(ALONE, UNTIED)
    assert caught.value.missing == (HEAD,)


def test_reconcile_lists_both_sides_and_shapes_at_once():
    source = {EMBED: TensorSpec((8, 5), F32), "extra": TensorSpec((1,), F32)}
    with pytest.raises(WeightMismatchError) as caught:
        reconcile(source, UNTIED)
    assert caught.value.missing == (NORM, HEAD)
    assert caught.value.unexpected == ("extra",)
    assert caught.value.shapes == (f"{EMBED}: source 8x5, rollout 8x4",)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64])
def test_reconcile_refuses_codes_in_place_of_numbers(dtype):
    """H-53, its kind: weights in a form of their own (quantised) would be cast, and nothing would be said."""
    for source, rollout in ((dtype, torch.bfloat16), (F32, dtype)):
        with pytest.raises(WeightMismatchError, match="kind of number") as caught:
            reconcile({NORM: TensorSpec((4,), source)}, {NORM: TensorSpec((4,), rollout)})
        assert caught.value.shapes == (f"{NORM}: source {source}, rollout {rollout}",)
    assert reconcile({NORM: TensorSpec((4,), dtype)}, {NORM: TensorSpec((4,), dtype)}) == {NORM: NORM}
    assert reconcile({NORM: TensorSpec((4,), torch.float64)}, {NORM: TensorSpec((4,), torch.float16)}) == {NORM: NORM}


def test_reconcile_refuses_a_shard():
    """H-53: a tensor of one shard does not pass for the whole one, on any dimension."""
    for shape in ((4, 4), (8, 2), (32,), (8, 4, 1)):
        with pytest.raises(WeightMismatchError) as caught:
            reconcile({**ALONE, EMBED: TensorSpec(shape, F32)}, ALONE)
        assert len(caught.value.shapes) == 1


def test_reconcile_resolves_each_name_against_the_live_model():
    """H-52: an adapter wraps the language part and not the merger; every name finds its own place, both ways."""
    plain = {
        "model.layers.0.q_proj.weight": TensorSpec((4, 4), F32),
        "model.layers.0.q_proj.bias": TensorSpec((4,), F32),
        "visual.merger.weight": TensorSpec((2, 2), F32),
    }
    wrapped = {
        "model.layers.0.q_proj.base_layer.weight": TensorSpec((4, 4), F32),
        "model.layers.0.q_proj.base_layer.bias": TensorSpec((4,), F32),
        "visual.merger.weight": TensorSpec((2, 2), F32),
    }
    to_wrapped = dict(zip(plain, wrapped, strict=True))
    assert reconcile(plain, wrapped) == to_wrapped
    assert reconcile(wrapped, plain) == {b: a for a, b in to_wrapped.items()}
    prefixed = {"base_model.model." + name: spec for name, spec in wrapped.items()}
    assert list(reconcile(prefixed, plain).values()) == list(plain)
    assert list(reconcile(plain, prefixed).values()) == list(prefixed)


def test_reconcile_refuses_two_names_for_one_place():
    source = {"a.weight": TensorSpec((1,), F32), "a.base_layer.weight": TensorSpec((1,), F32)}
    with pytest.raises(WeightMismatchError, match=r"same place as a\.weight"):
        reconcile(source, {"a.weight": TensorSpec((1,), F32)})


def test_tied_groups_names_only_what_is_sent_twice():
    assert tied_groups(reconcile(UNTIED, TIED), TIED) == {EMBED: EMBED, HEAD: EMBED}
    assert tied_groups(reconcile(ALONE, TIED), TIED) == {}
    assert tied_groups(reconcile(UNTIED, UNTIED), UNTIED) == {}
