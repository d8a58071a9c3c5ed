"""Shows the progress of a long command on standard error: a bar on a terminal, else occasional lines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlhpc.suite.files import LEAST_S, LEAST_SHARE, QUIET, print_progress, render_duration

PLAIN_INTERVAL_S = 5.0  # between two lines where there is no terminal
TERMINAL_NAME = "MLHPC_TERMINAL"  # set for the ranks when the command that started them had a terminal


@contextmanager
def start_progress(title: str, *, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (done, total) that shows progress. The time left assumes the pace so far."""
    if not shown or os.environ.get(QUIET):
        yield lambda done, total: None
    elif sys.stderr.isatty() or TERMINAL_NAME in os.environ:
        from rich.console import Console
        from rich.progress import Progress, Task, TimeRemainingColumn
        from rich.text import Text

        class TimeLeft(TimeRemainingColumn):
            def render(self, task: Task) -> Text:
                early = task.percentage < 100 * LEAST_SHARE or (task.elapsed or 0) < LEAST_S
                return Text("-:--:--") if early else super().render(task)

        columns = (*Progress.get_default_columns()[:-1], TimeLeft())
        with Progress(*columns, console=Console(force_terminal=True, stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        yield make_plain_progress(title, time.monotonic)


def make_plain_progress(title: str, clock: Callable[[], float]) -> Callable[[int, int], None]:
    """Return a function of (done, total) that prints a line at most every `PLAIN_INTERVAL_S` seconds of ``clock``."""
    begin = last = clock()

    def tell(done: int, total: int) -> None:
        nonlocal last
        now = clock()
        if done and now - last >= PLAIN_INTERVAL_S:
            last = now
            left = f", about {render_duration(round((now - begin) * (total - done) / done))} left"
            sure = done >= LEAST_SHARE * total and now - begin >= LEAST_S
            print_progress(f"{title}: {100 * done // total} %{left if sure else ''}", error=True)

    return tell
