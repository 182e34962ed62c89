"""The memory of a rank: rows that fit, what a step takes, and the plan of a run."""
