"""What a machine with a GPU can show, in one call of a few minutes: make gpu."""
