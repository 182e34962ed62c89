"""Episodes of several turns in environments: README.md."""
