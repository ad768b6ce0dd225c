"""Rollout engines behind one contract, and the in-place reshard that feeds them weights."""
