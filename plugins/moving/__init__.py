"""Moving over from TRL's GRPOTrainer and verl: which setting there is which one here.

`table.py` has them all; `python -m plugins.moving FILE.yaml` prints the command of a configuration;
an unknown setting's error asks the table, too. Nothing else uses it.
"""
