"""Every error is a `ControllerError`, also a standard error, and survives pickling."""

from __future__ import annotations

import inspect
import pickle

import pytest

from ostinato.controller import errors

LEAVES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, errors.ControllerError) and cls is not errors.ControllerError
]


def example(cls):
    if issubclass(cls, errors.WorkerFailed):
        return cls("actor", 1, "node7", "update_actor", "Traceback ...", "ValueError: x")
    if cls is errors.ResourcesUnavailable:
        return cls("global", {"GPU": 16.0}, {"GPU": 8.0}, "Ask for less.")
    return cls("text")


@pytest.mark.parametrize("cls", LEAVES, ids=lambda cls: cls.__name__)
def test_errors_are_standard_errors_and_pickle(cls):
    assert any(base.__module__ == "builtins" and base not in (Exception, BaseException, object) for base in cls.__mro__)
    error = example(cls)
    error.add_note("a note")
    twin = pickle.loads(pickle.dumps(error))
    assert (type(twin), str(twin), vars(twin)) == (cls, str(error), vars(error))


def test_worker_failed_says_where():
    text = str(example(errors.WorkerFailed))
    for part in ("'actor'", "rank 1", "node7", "'update_actor'", "ValueError: x", "Traceback ..."):
        assert part in text


def test_resources_unavailable_says_what_was_asked_and_what_is_free():
    text = str(example(errors.ResourcesUnavailable))
    assert "16 GPU" in text
    assert "8 GPU" in text
