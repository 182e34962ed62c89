"""The format of a checkpoint, and what writes and reads it."""
