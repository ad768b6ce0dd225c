"""How a role worker comes to its engine, and what all role workers do before they build one."""

from __future__ import annotations

import importlib

from ostinato.workers.core.config import EngineChoice, ModelConfig, OptimConfig
from ostinato.workers.core.engine import EngineFactory, Head, TrainEngine
from ostinato.workers.core.errors import ConfigError, EngineImportError, ModelMismatchError
from ostinato.workers.core.residency import Residency


def find_engine(path: str) -> EngineFactory:
    """Import an engine factory.

    Args:
        path: `module:name`, for example `ostinato.workers.fsdp:FsdpEngine`.

    Returns:
        The factory, called with head, model, optim, engine and trainable.

    Raises:
        EngineImportError: the path is not of that form, or leads nowhere.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise EngineImportError(f"engine '{path}': expected 'module:name', such as 'ostinato.workers.fsdp:FsdpEngine'")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise EngineImportError(
            f"engine '{path}': cannot import '{module_name}' ({error}); install the wheel that holds it"
        ) from error
    if not hasattr(module, name):
        raise EngineImportError(f"engine '{path}': module '{module_name}' has no '{name}'")
    return getattr(module, name)


def build_engine(
    path: str, choice: EngineChoice, model: ModelConfig, *, head: Head, optim: OptimConfig | None = None
) -> Residency:
    """Build an engine and move to the host what its flags say lies there between phases; collective over all ranks.

    Args:
        path: of the engine, as for `find_engine`.
        choice: the role's section, with the engine's own config.
        model: what to load.
        head: `lm` or `value`.
        optim: optimizer and schedule; None freezes the weights.

    Returns:
        The engine and where its state lies.
    """
    engine: TrainEngine = find_engine(path)(
        head=head, model=model, optim=optim, engine=choice.engine_config, trainable=optim is not None
    )
    engine.build()
    residency = Residency(engine, choice)
    residency.park()
    return residency


def prepare_model(model: ModelConfig, key: str) -> None:
    """Check that a model is named, and import what it brings along.

    Args:
        model: the role's model.
        key: its dotted key, for the error text.

    Raises:
        ConfigError: no path, or `external_lib` cannot be imported.
    """
    if not model.path:
        raise ConfigError(f"{key}.path: expected a Hugging Face folder or name, got ''")
    if model.external_lib:
        try:
            importlib.import_module(model.external_lib)
        except ImportError as error:
            raise ConfigError(f"{key}.external_lib: cannot import '{model.external_lib}': {error}") from error


def check_vocabulary(model: ModelConfig, policy_path: str | None, key: str) -> None:
    """Refuse a model that reads the policy's token ids differently.

    The tokenizers are compared, because folders of one family pad their vocabularies to different sizes.

    Args:
        model: the model that reads the policy's tokens.
        policy_path: the policy's folder; None: nothing to compare with.
        key: the model's dotted key, for the error text.

    Raises:
        ModelMismatchError: the two vocabularies differ.
    """
    if policy_path is None or policy_path == model.path:
        return
    from transformers import AutoTokenizer

    options = {"trust_remote_code": model.trust_remote_code}
    own = AutoTokenizer.from_pretrained(model.resolved_tokenizer_path, **options).get_vocab()
    policy = AutoTokenizer.from_pretrained(policy_path, **options).get_vocab()
    if own != policy:
        differing = next(token for token in (*policy, *own) if own.get(token) != policy.get(token))
        raise ModelMismatchError(
            f"{key}.path: expected the policy's vocabulary ({len(policy)} tokens, {policy_path}), got one of {len(own)}"
            f" tokens ({model.path}); token {differing!r} is {policy.get(differing)} there, {own.get(differing)} here. "
            "Take a reward model of the policy's family: text is not tokenised anew"
        )
