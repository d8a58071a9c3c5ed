"""Measures and predicts a machine's links: sweeps of all-to-alls, models fitted to them, MoE layers simulated
on them.
"""
