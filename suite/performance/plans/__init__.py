"""Predicts what a parallel plan costs, before anything runs."""
