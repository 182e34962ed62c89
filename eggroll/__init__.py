"""EGGROLL: evolution strategies with low-rank noise on unmodified Hugging Face models."""
