"""The figures of fitted networks: `FIGURES` names one module each, in the order of the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from mlhpc.plugins.network.sweep import SWEEP_KIND

if TYPE_CHECKING:
    from mlhpc.analysis.study import Study
    from mlhpc.plugins.network.fit import Fit

FIGURES = ("moe_network_fit", "moe_layer")
NEEDED = "an all-to-all sweep (mlhpc moe --sweep-network -o FILE) among the report's paths"


def list_fits(study: Study) -> tuple[Fit, ...]:
    """List the networks fitted to the sweeps of a report. Raises NotAnswerableError without one."""
    return cast("tuple[Fit, ...]", study.documents_of(SWEEP_KIND, NEEDED))
