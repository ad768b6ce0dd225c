"""FsdpEngine: ostinato's TrainEngine on PyTorch FSDP2."""
