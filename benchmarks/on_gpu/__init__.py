"""The checks that need a GPU, in one call of a few minutes: make gpu."""
