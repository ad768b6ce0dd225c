"""Tiny models on disk, weight sources over plain modules, prompts from token lists, and what answers should be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ostinato.protocol import DataProto

if TYPE_CHECKING:
    from ostinato.rollout.base import TensorSpec


def save_tiny_model(
    path: str | Path, *, tied: bool = True, seed: int = 0, scale: float = 0.1, **overrides: Any
) -> torch.nn.Module:
    """Write a random Qwen2 of 2 layers, hidden size 128 and 512 tokens (0.36 M parameters) and return it in float32.

    Args:
        path: folder to write `config.json` and weights to.
        tied: whether `lm_head` shares the embedding's memory.
        seed: of the weights; the global generator is left as it was.
        scale: standard deviation of the matrices; large enough that different tokens have clearly different logits.
        overrides: more keys of `Qwen2Config`.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    }
    config = Qwen2Config(**{**sizes, "tie_word_embeddings": tied, "eos_token_id": 1, "pad_token_id": 0, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(std=scale)
    model.save_pretrained(path)
    return model


class ModuleWeights:
    """A `WeightSource` over a plain module: one process, nothing sharded.

    Args:
        module: whose parameters are sent; those of a transformers model under the names of its folder.
        tied_names: also send the further names of a shared memory (a tied `lm_head.weight`), as some sources do.
    """

    def __init__(self, module: torch.nn.Module, *, tied_names: bool = False):
        self._module = module
        self._tied_names = tied_names

    def _named(self) -> dict[str, torch.Tensor]:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion

        named = {
            name: parameter.detach()
            for name, parameter in self._module.named_parameters(remove_duplicate=not self._tied_names)
        }
        return revert_weight_conversion(self._module, named) if isinstance(self._module, PreTrainedModel) else named

    def specs(self) -> dict[str, TensorSpec]:
        """Every parameter."""
        from ostinato.rollout.base import TensorSpec

        return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in self._named().items()}

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter through one buffer that the next one overwrites, as a gathering source does."""
        named = self._named()
        largest = max((tensor.numel() for tensor in named.values()), default=0)
        buffers: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
        for name, tensor in named.items():
            key = (tensor.device, tensor.dtype)
            if key not in buffers:
                buffers[key] = torch.empty(largest, dtype=tensor.dtype, device=tensor.device)
            view = buffers[key][: tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            yield name, view
            view.fill_(-1)


def make_prompts(
    token_lists: Sequence[Sequence[int]],
    *,
    width: int | None = None,
    rollout_ids: Sequence[int] | None = None,
    pad_token_id: int = 0,
) -> DataProto:
    """Left-padded prompt rows as a rollout reads them.

    Args:
        token_lists: one prompt a row.
        width: P; None is the longest prompt.
        rollout_ids: numbers of the rows; None is 0, 1, 2, ...
        pad_token_id: what stands in the padding.
    """
    lengths = np.asarray([len(tokens) for tokens in token_lists], dtype=np.int64)
    width = int(lengths.max(initial=1)) if width is None else width
    valid = np.arange(width) >= width - lengths[:, None]
    input_ids = np.full(valid.shape, pad_token_id, dtype=np.int64)
    if len(lengths):
        input_ids[valid] = np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens in token_lists])
    numbers = list(range(len(lengths))) if rollout_ids is None else list(rollout_ids)
    uid = np.empty(len(lengths), dtype=object)
    uid[:] = [f"prompt-{i}" for i in range(len(lengths))]
    return DataProto.from_dict(
        {
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(valid.astype(np.int64)),
            "position_ids": torch.from_numpy(np.clip(np.cumsum(valid, -1) - 1, 0, None)),
        },
        {"uid": uid, "rollout_id": np.asarray(numbers, dtype=object)},
    )


def tensors(rows: DataProto) -> dict[str, torch.Tensor]:
    """The tensor columns of what `generate` returned."""
    assert rows.batch is not None, "the output has no tensors"
    return {str(name): tensor for name, tensor in rows.batch.items()}


def responses(rows: DataProto) -> list[list[int]]:
    """The tokens of each response, without what stands behind it."""
    columns = tensors(rows)
    lengths = columns["response_mask"].sum(-1).tolist()
    return [row[:n] for row, n in zip(columns["responses"].tolist(), lengths, strict=True)]


@torch.no_grad()
def oracle(module: torch.nn.Module, rows: DataProto, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What a float32 forward pass says about responses, one row at a time.

    Args:
        module: a causal language model.
        rows: what `generate` returned.
        temperature: what logits are divided by.

    Returns:
        (B,R) float32 log-probabilities, and how much likelier the likeliest token is; 0 behind a response.
    """
    columns = tensors(rows)
    width = columns["prompts"].shape[1]
    log_probs = torch.zeros(columns["responses"].shape)
    regret = torch.zeros(columns["responses"].shape)
    for i in range(len(rows)):
        valid = columns["attention_mask"][i].bool()
        ids = columns["input_ids"][i][valid]
        n = int(valid[width:].sum())
        if n == 0:
            continue
        logits = module(input_ids=ids[None]).logits[0].float()
        table = (logits[len(ids) - n - 1 : -1] / temperature).log_softmax(-1)
        log_probs[i, :n] = table.gather(-1, ids[-n:, None]).squeeze(-1)
        regret[i, :n] = table.amax(-1) - log_probs[i, :n]
    return log_probs, regret
