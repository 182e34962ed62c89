"""Migration from TRL's GRPOTrainer and verl: the setting here for each setting there.

`table.py` lists all settings; `python -m plugins.moving FILE.yaml` prints the command for a
configuration; the error for an unknown setting looks up the table, too. Nothing else uses it.
"""
