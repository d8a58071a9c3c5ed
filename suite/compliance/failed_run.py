"""What the log of a run that failed may lack. One run of a result may fail, whenever and however it ended.

Only what follows from the end itself is forgiven: a failed run with another optimizer is still an error.
"""

from __future__ import annotations

from suite.compliance.rules.base import Finding
from suite.log import mllog
from suite.log.reader import Log
from suite.log.record import RunRecord

_OF_ANY = frozenset(
    {"run-unfinished", "run-aborted", "target-missed", "last-eval", "interval-open", "training-missing"}
)
"""What a run that did not converge may break."""
_OF_OTHER_CODES = frozenset({"status-true", "run-status"})
"""In MLPerf HPC rounds, whose codes logged success whether or not the target was reached."""
_BEFORE_THE_RUN = frozenset({"key-missing", "seed-missing"})
"""What a run that ended before run_start did not come to."""


def follows_from_failure(finding: Finding, run: RunRecord, cut: int | None, *, foreign: bool) -> bool:
    """Tell whether a finding in the log of a failed run follows from its failure. ``cut`` is its `cut_line`."""
    if finding.rule in _OF_ANY or (foreign and finding.rule in _OF_OTHER_CODES):
        return True
    if finding.rule == "event-valid":
        return finding.line is not None and finding.line == cut
    if run.run_start_s is None:
        return finding.rule in _BEFORE_THE_RUN or (
            finding.rule == "benchmark-known" and run.size is None and not foreign
        )
    return False


def cut_line(log: Log) -> int | None:
    """The number of the last line, if that alone is broken and the log has no run_stop: the process was ended in its middle."""
    if len(log.problems) != 1 or log.first(mllog.RUN_STOP) is not None:
        return None
    line = log.problems[0].line
    return line if all(event.line < line for event in log.events[-1:]) else None
