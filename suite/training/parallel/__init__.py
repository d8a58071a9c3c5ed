"""Parallelism applied to a model from outside: plan files, meshes of ranks, split samples, data parallelism."""
