"""RandOpt, a baseline for EGGROLL: the best of many perturbations vote."""
