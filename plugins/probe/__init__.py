"""The probe of EGGROLL: chooses sigma and lr on the run's own model and task."""
