"""One run on Slurm: README.md."""
