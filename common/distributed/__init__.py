"""Ranks: the context of a worker, workers of every kind, sharded weights, Slurm."""
