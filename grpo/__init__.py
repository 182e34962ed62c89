"""GRPO: policy gradient with group-relative advantages."""
