"""A gate against luck: whether a changed setting is kept."""
