"""Tasks, and what they are made of."""
