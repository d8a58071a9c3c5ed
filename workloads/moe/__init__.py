"""Mixture of experts, shared by the MoE workloads: router, dispatch, experts, all-to-all, layer, autotuner. No model."""
