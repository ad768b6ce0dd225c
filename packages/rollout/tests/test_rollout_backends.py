from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from ostinato.rollout import Backend, RolloutConfig, backends, build_rollout, check_installed, errors, register_backend


def test_backends_unknown_name_lists_the_known():
    for call in (check_installed, backends.load_backend):
        with pytest.raises(errors.UnknownBackendError, match="fake, hf, sglang, vllm") as caught:
            call("vlm")
        assert caught.value.key == "actor_rollout_ref.rollout.name"


@pytest.mark.parametrize(
    ("name", "line"),
    [("vllm", "pip install 'ostinato-rollout[vllm]'"), ("sglang", "pip install 'ostinato-rollout[sglang]'")],
)
def test_backends_absent_engine_says_how_to_install(name, line, monkeypatch):
    monkeypatch.setattr(backends, "_is_importable", lambda module: module != name)
    with pytest.raises(errors.BackendUnavailableError) as caught:
        check_installed(name)
    assert line in str(caught.value)
    assert isinstance(caught.value, ImportError)


def test_backends_missing_adapter_is_a_named_error(monkeypatch):
    monkeypatch.setitem(backends._BACKENDS, "later", Backend("ostinato.rollout.backends.later:Later"))
    with pytest.raises(errors.BackendNotImplementedError, match="no adapter"):
        check_installed("later")
    assert issubclass(errors.BackendNotImplementedError, NotImplementedError)


@pytest.mark.parametrize("name", ["hf", "fake"])
def test_backends_of_this_wheel_are_installed(name):
    check_installed(name)


def test_backends_register_adds_a_name_once(monkeypatch):
    monkeypatch.setattr(backends, "_BACKENDS", dict(backends._BACKENDS))
    own = Backend("ostinato.rollout.backends.fake:FakeRollout")
    register_backend("own", own)
    register_backend("own", own)
    assert build_rollout(RolloutConfig(name="own"), model_path="nowhere").dp_size == 1
    with pytest.raises(errors.ConfigError, match="another name"):
        register_backend("hf", own)


def test_importing_the_wheel_imports_no_engine():
    code = (
        "import sys, logging, os; env = dict(os.environ); import ostinato.rollout, ostinato.rollout.reshard;"
        "heavy = {'transformers', 'vllm', 'sglang', 'ray', 'ostinato.controller'} & set(sys.modules);"
        "assert not heavy, heavy; assert not logging.getLogger().handlers; assert env == dict(os.environ)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_errors_are_standard_library_errors_and_pickle():
    cases = [
        (errors.ConfigError("m", key="a.b"), ValueError),
        (errors.UnknownBackendError("m", key="a.b"), ValueError),
        (errors.BackendUnavailableError("m", name="vllm"), ImportError),
        (errors.BackendNotImplementedError("m"), NotImplementedError),
        (errors.WeightMismatchError("m", missing=("a",), unexpected=("b",), shapes=("c",)), ValueError),
        (errors.EngineStateError("m"), RuntimeError),
        (errors.PromptError("m"), ValueError),
        (errors.GenerationError("m"), RuntimeError),
    ]
    for error, base in cases:
        again = pickle.loads(pickle.dumps(error))
        assert isinstance(again, base)
        assert isinstance(again, errors.RolloutError)
        assert (type(again), str(again), vars(again)) == (type(error), "m", vars(error))
