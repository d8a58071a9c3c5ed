"""Performance of machines and models: measured ceilings, FLOP counts, profiles, hardware counters, cost models."""
