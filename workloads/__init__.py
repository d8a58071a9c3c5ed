"""The workloads: one folder each, none imports another."""
