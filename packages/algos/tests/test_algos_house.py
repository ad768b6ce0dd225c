"""What holds for the whole wheel: purity, imports, signatures."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import beartype
import jaxtyping
import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import ostinato.algos as algos

SOURCE = Path(algos.__file__).parent
FILES = sorted(SOURCE.glob("*.py"))
FUNCTIONS = [name for name in algos.__all__ if inspect.isfunction(getattr(algos, name))]


def imported_roots(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module).split(".")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_modules_need_torch_alone(path):
    roots = set(imported_roots(ast.parse(path.read_text())))
    assert roots <= {"torch", "ostinato", "jaxtyping"} | set(sys.stdlib_module_names)
    if path.name != "_typing.py":
        assert "jaxtyping" not in roots


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_module_reads_a_tensor_value_on_the_host(path):
    """House rule 4; `tolist` is for label lists only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            assert node.attr not in {"item", "cpu", "numpy", "print"}
            assert node.attr != "tolist" or path.name == "groups.py"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_and_functions_stay_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            doc = ast.get_docstring(node, clean=False)
            length = (node.end_lineno or 0) - node.lineno + 1 - (len(doc.splitlines()) if doc else 0)
            assert length <= 60, node.name


BLOCKED = """
import sys
for name in ("jaxtyping", "beartype", "numpy_", "ray", "vllm", "transformers", "hydra", "omegaconf", "tensordict"):
    sys.modules[name] = None
import torch
import ostinato.algos as algos
logits, labels = torch.zeros(2, 3), torch.tensor([0, 1])
assert algos.token_log_probs(logits, labels).shape == (2,)
advantages, _ = algos.grpo(torch.eye(2), torch.ones(2, 2), groups=["a", "a"])
assert advantages.shape == (2, 2)
import typing
typing.get_type_hints(algos.grpo)
"""


def failure(code: str) -> str:
    """Run a program; what it wrote on stderr where it failed, empty where it did not."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr or f"exit code {done.returncode}"


def test_the_wheel_works_without_jaxtyping_or_anything_heavy():
    """H-79."""
    assert not failure(BLOCKED)


EFFECTS = """
import logging, os, torch
def state():
    return dict(os.environ), list(logging.root.handlers), torch.get_rng_state().sum(), torch.is_grad_enabled()
before = state()
import ostinato.algos
assert before == state()
"""


def test_importing_has_no_effects():
    assert not failure(EFFECTS)


README = Path(__file__).parents[1] / "README.md"


@pytest.mark.skipif(not README.exists(), reason="the tests run without the source tree")
def test_the_example_of_the_readme_runs_and_its_tables_are_complete():
    text = README.read_text()
    assert not failure(text.split("```python")[1].split("```")[0])
    for name in algos.__all__:
        registered = name in ("gpg_loss", "clip_cov", "kl_cov", "select_clip_cov", "select_kl_cov", "PolicyLoss")
        assert f"`{name}" in text or registered or name == "RolloutCorrection", name
    for name in (*algos.adv_estimators(), *algos.policy_losses()):
        assert f"`{name}`" in text


B, R, N, V, D = 4, 3, 5, 7, 2
TOKENS = torch.zeros(B, R)
MASK = torch.ones(B, R)
GROUPS = np.array(["a", "a", "b", "b"], dtype=object)
LOSS = (TOKENS, TOKENS, TOKENS, MASK)
LABELS = torch.zeros(N, dtype=torch.int64)

CALLS = {
    "adv_estimators": ((), {}),
    "aggregate": ((TOKENS, MASK.bool(), "token-mean"), {"num_tokens": torch.tensor(3), "num_sequences": 2}),
    "cispo": (LOSS, {}),
    "clip_cov": (LOSS, {"selected": MASK.bool()}),
    "count_valid": ((MASK.int(),), {}),
    "dppo_kl": (LOSS, {}),
    "dppo_tv": (LOSS, {}),
    "dro": (LOSS, {"weights": TOKENS}),
    "full_kl": ((torch.zeros(N, V), torch.zeros(N, V)), {}),
    "gae": ((TOKENS, MASK), {"values": TOKENS}),
    "gdpo": ((TOKENS, MASK), {"groups": GROUPS, "reward_scores": {"x": torch.zeros(B)}, "weights": {"x": 1.0}}),
    "geo_mean": (LOSS, {}),
    "get_adv_estimator": (("grpo",), {}),
    "get_policy_loss": (("gspo",), {}),
    "get_token_selector": (("clip_cov",), {}),
    "gpg": ((TOKENS, MASK), {"groups": list("aabb"), "rollouts": (1, 2, 3, 4)}),
    "gpg_loss": (LOSS, {}),
    "group_index": ((GROUPS,), {}),
    "grpo": ((TOKENS, MASK), {"groups": GROUPS, "rollouts": np.arange(4)}),
    "grpo_passk": ((TOKENS, MASK), {"groups": GROUPS}),
    "gspo": (LOSS, {}),
    "keywords": ((algos.grpo,), {}),
    "kl_cov": (LOSS, {"selected": MASK}),
    "kl_penalty": ((TOKENS, TOKENS, "k3"), {"response_mask": MASK}),
    "masked_mean": ((TOKENS, MASK), {"dim": -1}),
    "masked_sum": ((TOKENS, MASK), {}),
    "masked_whiten": ((TOKENS, MASK), {}),
    "opo": ((TOKENS, MASK), {"groups": GROUPS}),
    "optimal_token_baseline": ((TOKENS, MASK), {"groups": GROUPS, "log_probs": TOKENS, "sum_pi_squared": TOKENS}),
    "place_outcome": ((torch.zeros(B), MASK), {}),
    "policy_losses": ((), {}),
    "register_adv_est": (("some-name",), {}),
    "register_policy_loss": (("some-name",), {}),
    "reinforce_plus_plus": ((TOKENS, MASK), {"gamma": 1.0}),
    "reinforce_plus_plus_baseline": ((TOKENS, MASK), {"groups": GROUPS}),
    "remax": ((TOKENS, MASK), {"reward_baselines": torch.zeros(B)}),
    "response_states": ((torch.zeros(B, R + 2), R), {}),
    "rewards_with_kl": ((TOKENS, TOKENS, TOKENS, MASK, 0.1), {"kind": "k1"}),
    "rloo": ((TOKENS, MASK), {"groups": GROUPS}),
    "rollout_correction": ((TOKENS, TOKENS, MASK), {"rollout_is": "token"}),
    "rollout_probs_diff": ((TOKENS, TOKENS, MASK), {}),
    "sapo": (LOSS, {}),
    "select_clip_cov": ((TOKENS, TOKENS, MASK), {}),
    "select_kl_cov": ((torch.zeros(5), torch.zeros(5), torch.ones(5)), {}),
    "token_entropy": ((torch.zeros(N, V, dtype=torch.bfloat16),), {}),
    "token_log_probs": ((torch.zeros(N, V), LABELS), {"temperature": 0.5}),
    "token_log_probs_and_entropy": ((torch.zeros(N, V), LABELS), {}),
    "token_log_probs_and_entropy_from_hidden": ((torch.zeros(N, D), torch.zeros(V, D), LABELS), {}),
    "token_log_probs_from_hidden": ((torch.zeros(N, D), torch.zeros(V, D), LABELS), {}),
    "token_sum_pi_squared": ((torch.zeros(N, V),), {}),
    "token_sum_pi_squared_from_hidden": ((torch.zeros(N, D), torch.zeros(V, D)), {}),
    "value_loss": ((TOKENS, TOKENS, TOKENS, MASK, 0.5), {}),
    "vanilla": (LOSS, {"clip_ratio_c": None}),
}


def test_every_public_function_has_a_checked_call():
    assert set(CALLS) == set(FUNCTIONS)


def checked(name):
    # Without the no_grad wrapper, which takes (*args, **kwargs); an import hook decorates inside of it as well.
    fn = inspect.unwrap(getattr(algos, name))
    return jaxtyping.jaxtyped(typechecker=beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True)))(fn)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_hold_for_a_good_call(name):
    args, kwargs = CALLS[name]
    checked(name)(*args, **kwargs)


def to_meta(value: Any) -> Any:
    if torch.is_tensor(value):
        return value.to("meta")
    return {key: to_meta(item) for key, item in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if any(torch.is_tensor(arg) for arg in CALLS[name][0])])
def test_functions_stay_on_the_device_and_read_no_value(name):
    """On the meta device a value read on the host, or a tensor of another device in the arithmetic, is an error."""
    args, kwargs = CALLS[name]
    fn = getattr(algos, name)
    result = fn(*map(to_meta, args), **to_meta(kwargs))
    leaves = tree_leaves(vars(result) if dataclasses.is_dataclass(result) else result)
    assert any(torch.is_tensor(leaf) for leaf in leaves)
    assert all(leaf.device.type == "meta" for leaf in leaves if torch.is_tensor(leaf))


TRANSPOSED = [
    name
    for name in FUNCTIONS
    if sum(torch.is_tensor(arg) for arg in CALLS[name][0]) >= 2 and name not in ("masked_mean", "masked_sum")
]


@pytest.mark.parametrize("name", TRANSPOSED)
def test_signatures_catch_a_shape_that_does_not_fit(name):
    """The annotations say more than "a tensor": a transposed second argument breaks them."""
    args, kwargs = CALLS[name]
    second = args[1][:-1] if args[1].dim() == 1 else args[1].mT
    with pytest.raises(jaxtyping.TypeCheckError):
        checked(name)(args[0], second, *args[2:], **kwargs)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_says_what_it_takes_and_gives(name):
    doc = inspect.getdoc(getattr(algos, name))
    assert doc is not None
    parameters = inspect.signature(getattr(algos, name)).parameters
    if parameters and name not in ("get_adv_estimator", "get_policy_loss", "get_token_selector"):
        assert "Args:" in doc
        for parameter in parameters:
            assert f"{parameter}:" in doc, parameter
        assert "Returns:" in doc


@pytest.mark.parametrize("name", [*algos.adv_estimators(), *algos.policy_losses()])
def test_every_formula_names_its_source(name):
    fn = algos.get_adv_estimator(name) if name in algos.adv_estimators() else algos.get_policy_loss(name)
    assert "Source:" in (inspect.getdoc(fn) or "")


def test_the_package_is_a_namespace_member():
    assert not (SOURCE.parent / "__init__.py").exists()
    assert (SOURCE / "py.typed").exists()
