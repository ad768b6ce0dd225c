"""A copy of a model with more attention heads that computes the same: the added ones are zeros.

    python benchmarks/ppo/pad_heads.py SOURCE TARGET --kv-heads 4

Tensor parallelism wants heads that divide by the ranks; SmolLM2-135M has 9 and 3. A group of zero heads answers 0 into
zero columns of the output projection, and no gradient reaches it: in training too it stays the model that it was.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig


def pad_heads(source: Path, target: Path, kv_heads: int) -> None:
    """Write `source` with `kv_heads` key-value heads, and as many query heads for each of them as before, to `target`.

    Args:
        source: A folder of a Llama or Qwen2 model, its weights in safetensors.
        target: A folder, made here.
        kv_heads: At least those of the model.
    """
    config = AutoConfig.from_pretrained(source)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    group = config.num_attention_heads // config.num_key_value_heads
    rows = {"q_proj": kv_heads * group * size, "k_proj": kv_heads * size, "v_proj": kv_heads * size}
    shutil.copytree(source, target, dirs_exist_ok=True)
    for file in target.glob("*.safetensors"):
        weights = load_file(file)
        for name, tensor in weights.items():
            layer = name.split(".")[-2]
            if layer in rows:
                weights[name] = torch.cat([tensor, tensor.new_zeros(rows[layer] - len(tensor), *tensor.shape[1:])])
            elif layer == "o_proj" and name.endswith("weight"):
                added = tensor.new_zeros(len(tensor), rows["q_proj"] - tensor.shape[1])
                weights[name] = torch.cat([tensor, added], dim=1)
        save_file(weights, file, metadata={"format": "pt"})
    config.head_dim, config.num_key_value_heads, config.num_attention_heads = size, kv_heads, kv_heads * group
    config.save_pretrained(target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--kv-heads", type=int, required=True)
    options = parser.parse_args()
    pad_heads(options.source, options.target, options.kv_heads)
