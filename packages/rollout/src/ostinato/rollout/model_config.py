"""A model folder's configuration with a run's overrides; training, rollout and export build their models from it."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.rollout.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ATTENTION = "attn_implementation"
"""The one override that is about an engine and not about the model; each engine has its own attention."""


def read_model_config(
    path: str | Path, overrides: Mapping[str, Any] | None = None, *, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Read a folder's `config.json` and put the overrides in.

    Args:
        path: Hugging Face folder or name.
        overrides: `model.override_config`; entry -> value. `attn_implementation` is passed over.
        trust_remote_code: run code that comes with the model.

    Raises:
        ConfigError: an entry that the model's configuration does not have.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    for name, value in (overrides or {}).items():
        if name == ATTENTION:
            continue
        if not hasattr(config, name):
            near = get_close_matches(name, config.to_dict(), n=1)
            raise ConfigError(
                f"model.override_config.{name}: {type(config).__name__} of {path} has no such entry, so it would have "
                f"no effect. {f'Did you mean {near[0]}?' if near else 'Take an entry that it has.'}",
                key=f"model.override_config.{name}",
            )
        setattr(config, name, value)
    return config
