"""The one way from examples to scored completions, for every algorithm and for evaluation."""
