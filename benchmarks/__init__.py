"""The speed of this project and of its peers: python -m benchmarks NAME."""
