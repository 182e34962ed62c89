"""Demo tasks: README.md."""
