"""How fast a machine and a model are: measured ceilings, FLOP counts, profiles, hardware counters, cost models."""
