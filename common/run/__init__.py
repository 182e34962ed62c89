"""The frame of a run: its session, its steps, and what the session does between two of them."""
