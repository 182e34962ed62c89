"""Classifier training and the data-parallel scaling benchmark."""
