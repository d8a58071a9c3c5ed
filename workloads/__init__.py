"""The workloads, one folder each. No workload imports another; those with experts share `mlhpc.workloads.moe`."""
