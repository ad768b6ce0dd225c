"""A model folder's configuration with a run's overrides, and its end and padding tokens.

Training, rollout and export build their models from this configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def end_tokens(model_path: str | Path, model_config: Any, tokenizer: Any = None) -> tuple[int, ...]:
    """The tokens that end a response: those of `generation_config.json` and the tokenizer, else those of the config."""
    from transformers import GenerationConfig

    found: list[int] = []
    if (Path(model_path) / "generation_config.json").is_file():
        found += _as_ids(GenerationConfig.from_pretrained(model_path).eos_token_id)
    found += _as_ids(getattr(tokenizer, "eos_token_id", None))
    return tuple(dict.fromkeys(found or _as_ids(getattr(model_config, "eos_token_id", None))))


def _as_ids(value: int | Sequence[int] | None) -> list[int]:
    if value is None:
        return []
    return [int(value)] if isinstance(value, int) else [int(token) for token in value]


def pad_token(tokenizer: Any, model_config: Any, eos: tuple[int, ...]) -> int:
    """Only fills places: masks come from lengths, so any token serves where none is declared."""
    for holder in (tokenizer, model_config.get_text_config(decoder=True)):
        token = getattr(holder, "pad_token_id", None)
        if isinstance(token, int) and token >= 0:
            return token
    return eos[0] if eos else 0
