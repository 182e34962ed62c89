"""Only YAML: the values of every setting."""
