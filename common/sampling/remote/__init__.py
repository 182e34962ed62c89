"""Engines in a process of their own, with weights of their own."""
