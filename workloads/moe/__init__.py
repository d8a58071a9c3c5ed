"""Mixture of experts for the MoE workloads: router, dispatch, experts, all-to-all, layer, autotuner. No model."""
