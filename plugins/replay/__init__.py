"""A fine-tune in a few kilobytes: record a run's fitness, rebuild any of its models: README.md."""
