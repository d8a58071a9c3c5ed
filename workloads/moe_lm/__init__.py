"""A byte-level language model with mixture-of-experts layers, on generated or real text. No torch."""

from pathlib import Path

from mlhpc.suite.descriptor import Descriptor

DESCRIPTOR = Descriptor(
    name="moe_lm",
    folder=Path(__file__).parent,
    hyperparameters="mlhpc.workloads.moe_lm.config:MoELMConfig",
    implementation="mlhpc.workloads.moe_lm.workload:MoELM",
    generator="mlhpc.workloads.moe_lm.generate",
    no_stages="",
)
