"""Logs to tables: runs, epochs, evaluations, phases, ranks, experts, systems."""
