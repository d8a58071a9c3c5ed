"""A made-up result of `mlhpc numerics deploy`, for tests and for the gallery of figures."""

from __future__ import annotations

from pathlib import Path

import msgspec

from mlhpc.plugins.numerics.results import Deployed, Numerics

RESULT = Numerics(
    question="deploy",
    workload="swinv2_moe",
    size="mini",
    metric="eval_accuracy",
    values=(0.98, 0.99, 0.97),
    deployed=(
        Deployed(change="float16", group="precision", deltas=(0.0, 0.0, 0.0), mean=0.0, low=-0.001, high=0.001),
        Deployed(change="nearest", group="resize", deltas=(-0.02, -0.03, -0.01), mean=-0.02, low=-0.03, high=-0.01),
        Deployed(change="padding", group="padding", why="no bit changes"),
    ),
)


def write_examples(root: Path) -> list[Path]:
    """Write the file that the figure needs."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / "deploy.json"
    path.write_bytes(msgspec.json.encode(RESULT))
    return [path]
