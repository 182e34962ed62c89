"""Language models: load, encode, train, copy, export."""
