"""The data sets of reasoning-gym as a task: README.md."""
