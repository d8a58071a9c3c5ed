"""Kernels in Triton for layers without drops: `fused` runs them. Nothing here is loaded before the back end ``triton`` is used."""
