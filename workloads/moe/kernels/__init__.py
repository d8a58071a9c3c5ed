"""Kernels in Triton for layers without drops; `fused` runs them. They load at the first use of back end ``triton``."""
