"""The maths of RL post-training for language models: pure functions over tensors."""
