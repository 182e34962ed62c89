"""The YAML files that Hydra composes; a package so that they travel with an installed wheel."""
