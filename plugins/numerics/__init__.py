"""Says whether a difference between two systems is rounding or a fault, and what a change of the deployment costs.

`mlhpc numerics reproduce` judges one training step against float64; `mlhpc numerics deploy` evaluates trained models
(docs/numerics.md).
"""

USES = ()
