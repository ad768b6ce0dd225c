"""Random models of a few thousand parameters, written as Hugging Face folders with a byte tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

PAD, BOS, EOS = 256, 257, 258
VOCAB_SIZE = 264

_TEMPLATE = (
    "{% for message in messages %}<bos>{{ message['role'] }}\n{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)


def tiny_causal_lm(
    path: Path | str,
    *,
    architecture: Literal["qwen2", "llama"] = "qwen2",
    vocab_size: int = VOCAB_SIZE,
    hidden_size: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_positions: int = 512,
    tie_word_embeddings: bool = True,
    seed: int = 0,
    scale: float = 0.2,
    tokenizer: bool = True,
) -> Path:
    """Write a random causal language model.

    Args:
        path: the folder to make.
        architecture: `qwen2` or `llama`.
        vocab_size: at least 259 where a tokenizer is written (256 bytes and three special tokens).
        hidden_size: width.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        max_positions: longest sequence.
        tie_word_embeddings: share embedding and output weights.
        seed: of the weights.
        scale: standard deviation of the weights; large enough that the distribution is far from uniform.
        tokenizer: write a byte tokenizer with a chat template too.

    Returns:
        The folder.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    config_type, model_type = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}[
        architecture
    ]
    config = config_type(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie_word_embeddings,
        initializer_range=scale,
        pad_token_id=PAD if vocab_size > EOS else None,
        bos_token_id=BOS if vocab_size > EOS else None,
        eos_token_id=EOS if vocab_size > EOS else vocab_size - 1,
        attention_dropout=0.0,
    )
    return _write(model_type, config, Path(path), seed, tokenizer)


def tiny_reward_model(path: Path | str, *, vocab_size: int = VOCAB_SIZE, seed: int = 1) -> Path:
    """Write a random sequence-classification model with one output.

    Args:
        path: the folder to make.
        vocab_size: as for `tiny_causal_lm`.
        seed: of the weights.

    Returns:
        The folder.
    """
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    config.num_labels = 1
    return _write(Qwen2ForSequenceClassification, config, Path(path), seed, True)


def _write(model_type: Any, config: Any, path: Path, seed: int, tokenizer: bool) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_type(config)
    model.save_pretrained(path)
    if tokenizer:
        byte_tokenizer().save_pretrained(path)
    return path


def byte_tokenizer() -> Any:
    """Make a tokenizer with one token a byte and three special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<pad>", "<bos>", "<eos>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<pad>",  # bytes know no unknown token; without this, some tokenizer classes add their own
        chat_template=_TEMPLATE,
    )
