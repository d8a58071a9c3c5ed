"""Energy of a run from files: power logs in the official form, their integrals over the run, the energy to solution.

No devices.
"""
