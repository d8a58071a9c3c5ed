"""A byte-level language model with mixture-of-experts layers, on generated or real text. No torch."""

from pathlib import Path

from suite.descriptor import Descriptor
from workloads.moe_lm.config import MoELMConfig

DESCRIPTOR = Descriptor(
    name="moe_lm",
    folder=Path(__file__).parent,
    hyperparameters=MoELMConfig,
    implementation="workloads.moe_lm.workload:MoELM",
    generator="workloads.moe_lm.generate",
)
