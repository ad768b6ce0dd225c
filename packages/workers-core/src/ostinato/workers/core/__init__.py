"""The role workers and the one update loop of ostinato, written against the TrainEngine contract."""
