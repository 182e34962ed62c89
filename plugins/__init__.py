"""Parts that a run does without. Each folder can be deleted, and nothing else has to change."""
