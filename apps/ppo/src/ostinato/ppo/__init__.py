"""PPO and GRPO for language models, end to end: the reference app of ostinato."""
