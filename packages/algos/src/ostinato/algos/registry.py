"""Advantage estimators and policy losses by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ostinato.algos.errors import ArgumentError, unknown_name

F = TypeVar("F", bound=Callable[..., Any])

_ADV_ESTIMATORS: dict[str, Callable[..., Any]] = {}
_POLICY_LOSSES: dict[str, Callable[..., Any]] = {}
_TOKEN_SELECTORS: dict[str, Callable[..., Any]] = {}


def _register(kind: str, table: dict[str, Callable[..., Any]], name: str) -> Callable[[F], F]:
    def add(fn: F) -> F:
        held = table.get(name)
        # The same function again is a reloaded module, not a clash.
        if held is not None and (held.__module__, held.__qualname__) != (fn.__module__, fn.__qualname__):
            raise ArgumentError(
                f"{kind} {name!r} is already {held.__module__}.{held.__qualname__}; register under another name"
            )
        table[name] = fn
        return fn

    return add


def register_adv_est(name: str) -> Callable[[F], F]:
    """Decorator: make an advantage estimator known as `name`.

    The function is called as `fn(token_level_rewards, response_mask, **what its own signature names)` and returns
    `(advantages, returns)`, both (B, R), exactly 0 under the mask.

    Args:
        name: the value of `algorithm.adv_estimator`.

    Returns:
        The decorator; it gives the function back unchanged.

    Raises:
        ArgumentError: another function has the name.
    """
    return _register("advantage estimator", _ADV_ESTIMATORS, name)


def register_policy_loss(name: str, *, selector: Callable[..., Any] | None = None) -> Callable[[F], F]:
    """Decorator: make a policy loss known as `name`.

    The function is called as `fn(log_probs, old_log_probs, advantages, response_mask, *, its own keywords, weights)`
    and returns a `PolicyLoss` of per-token values.

    Args:
        name: the value of `actor.policy_loss.loss_mode`.
        selector: how to choose the tokens that the loss takes as its keyword `selected`, see `get_token_selector`.

    Returns:
        The decorator; it gives the function back unchanged.

    Raises:
        ArgumentError: another function has the name.
    """
    add = _register("policy loss", _POLICY_LOSSES, name)

    def add_both(fn: F) -> F:
        fn = add(fn)
        if selector is not None:
            _TOKEN_SELECTORS[name] = selector
        return fn

    return add_both


def get_adv_estimator(name: str) -> Callable[..., Any]:
    """The advantage estimator called `name`.

    Raises:
        UnknownNameError: no such estimator; the text lists the known ones.
    """
    if name not in _ADV_ESTIMATORS:
        raise unknown_name("algorithm.adv_estimator", name, _ADV_ESTIMATORS)
    return _ADV_ESTIMATORS[name]


def get_policy_loss(name: str) -> Callable[..., Any]:
    """The policy loss called `name`.

    Raises:
        UnknownNameError: no such loss; the text lists the known ones.
    """
    if name not in _POLICY_LOSSES:
        raise unknown_name("actor.policy_loss.loss_mode", name, _POLICY_LOSSES)
    return _POLICY_LOSSES[name]


def get_token_selector(name: str) -> Callable[..., Any] | None:
    """How the policy loss called `name` chooses tokens over a whole mini-batch, where it does.

    Such a loss takes a keyword `selected`, a mask like `response_mask`. It is made once a mini-batch, from the values
    of all its micro-batches and ranks after a forward pass without gradient:
    `selector(log_probs, advantages, response_mask, **its own keywords) -> mask`, tensors of any one shape.

    Returns:
        The selector, or None where the loss needs none.

    Raises:
        UnknownNameError: no such loss; the text lists the known ones.
    """
    get_policy_loss(name)
    return _TOKEN_SELECTORS.get(name)


def adv_estimators() -> tuple[str, ...]:
    """The names of all advantage estimators, sorted."""
    return tuple(sorted(_ADV_ESTIMATORS))


def policy_losses() -> tuple[str, ...]:
    """The names of all policy losses, sorted."""
    return tuple(sorted(_POLICY_LOSSES))


def keywords(fn: Callable[..., Any]) -> dict[str, bool]:
    """What an estimator or a loss wants beside its leading tensors.

    Args:
        fn: a function from one of the registries.

    Returns:
        keyword name -> whether it must be given, in the order of the signature. The tensors that every estimator
        (`token_level_rewards`, `response_mask`) and every loss (`log_probs`, `old_log_probs`, `advantages`,
        `response_mask`) takes by position are left out.
    """
    parameters = inspect.signature(fn).parameters.values()
    return {
        parameter.name: parameter.default is inspect.Parameter.empty
        for parameter in parameters
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
