"""An estimate of the four algorithms on a cluster: README.md."""
