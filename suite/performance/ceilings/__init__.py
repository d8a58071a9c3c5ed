"""Measured roofs of the machine a process runs on: what `mlhpc ceilings` does. Each resource is one module here.

`document` is the file and `plateaus` finds memory levels; both are pure. The others measure, and every rank calls them.
"""
