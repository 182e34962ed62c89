"""What a command does to its machine: files, locks, signals, exit codes, the terminal, user code."""
