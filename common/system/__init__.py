"""The machine under a command: files, locks, signals, exit codes, the terminal, user code."""
