"""Computes the energy of a run from files: power logs, their integrals over the run, energy to solution. No devices."""
