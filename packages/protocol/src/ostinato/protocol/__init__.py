"""DataProto: the one object that every stage of an RL post-training loop passes on."""
