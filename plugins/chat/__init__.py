"""Try a model from the command line: README.md."""
