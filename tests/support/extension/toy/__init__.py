"""A toy algorithm, as docs/architecture.md adds one: hill climbing on the weights."""
