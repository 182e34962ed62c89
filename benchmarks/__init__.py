"""Speed of this project beside its peers: python -m benchmarks NAME."""
