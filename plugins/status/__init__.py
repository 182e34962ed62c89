"""The state of a run, for programs and for people."""
