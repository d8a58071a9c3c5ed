"""Mixture of experts: what the MoE workloads share. Router, dispatch, experts, all-to-all, layer and autotuner; no model."""
