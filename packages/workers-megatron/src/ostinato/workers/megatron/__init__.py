"""MegatronEngine: ostinato's TrainEngine on Megatron-Core."""
