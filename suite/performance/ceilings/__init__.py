"""Measures the ceilings of the machine, for `mlhpc ceilings`. Each resource is one module.

`document` holds the types and the file, `plateaus` finds memory levels; both are pure. The others measure: all ranks
call them.
"""
