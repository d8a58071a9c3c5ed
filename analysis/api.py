"""Gives Python programs the results at some paths as tables, figures and a report."""

from __future__ import annotations

import contextlib
import glob
import html
import io
from collections.abc import Iterable, Sequence
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, NoReturn

import click
import pandas as pd

from mlhpc.analysis.drawing.view import render_count
from mlhpc.analysis.sources.readers import read_sources
from mlhpc.analysis.study import Study, read_study
from mlhpc.suite.descriptor import describe_card, list_installed_cards, use_cards
from mlhpc.suite.errors import InputError, explain_attribute, explain_unknown_name
from mlhpc.suite.files import convert_to_path, render_duration
from mlhpc.suite.log.run_folder import RunFolder

if TYPE_CHECKING:
    import altair as alt

    from mlhpc.analysis.drawing.view import View

NOTEBOOK_COLUMNS = {  # in a notebook: column of results, and its heading
    "label": "result",
    "benchmark": "benchmark",
    "size": "size",
    "mode": "mode",
    "division": "division",
    "n_started": "runs",
    "time": "time to train",
    "models_per_min": "models/min",
    "score_note": "note",
}
MOST_ROWS = 200  # of a notebook's table


def find_paths(patterns: Iterable[str | Path]) -> list[Path]:
    """Return the paths that are given, or match a pattern with * and ?.

    Raises InputError for one that does not exist, or matches nothing.
    """
    found: list[Path] = []
    for pattern in patterns:
        path = convert_to_path(pattern)
        # A name with * or ? in it that exists is meant as it stands
        matches = [path] if path.exists() else [Path(name) for name in sorted(glob.glob(str(path)))]  # noqa: PTH207  it may be absolute
        if not matches:
            raise InputError(f"{pattern}: does not exist; expected a run folder, a package, a round or a log")
        found += matches
    if not found:
        raise InputError("expected at least one path: a run folder, a package, a round or a log")
    return list(dict.fromkeys(found))


def _find_own_cards(paths: Iterable[Path], given: Sequence[Path]) -> list[Path]:
    """Find the cards in the run folders of own loops, one for each benchmark that no other card describes.

    Reviewers judge by a copy of their own. Here a person looks at runs of their own.
    """
    known = {describe_card(card).card().mlperf_name for card in given} | set(list_installed_cards())
    found: dict[str, Path] = {}
    for info in (
        info for path in paths if path.is_dir() for info in sorted(path.rglob(RunFolder(Path()).info_path.name))
    ):
        card = RunFolder(info.parent).card_path
        if card.is_file() and (name := describe_card(card).card().mlperf_name) not in known:
            found.setdefault(name, card)
    return list(found.values())


def _view(name: str) -> View:
    from mlhpc.analysis.figures import list_views

    if name not in list_views():
        raise InputError(explain_unknown_name("figure", name, tuple(list_views())))
    return list_views()[name]


class Page(PosixPath):
    """The path of a report's page. A notebook shows the page itself."""

    def _repr_html_(self) -> str:
        content = html.escape(self.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{content}" style="width: 100%; height: 45em; border: 0"></iframe>'


class Results:
    """Holds results as tables and figures. docs/tables.md says what the columns of the tables mean.

    ``runs``, ``results``, ``epochs``, ``evals``, ``phases``, ``ranks``, ``experts`` and ``systems`` are data frames.
    The figures are made of them: change a copy, not them.
    """

    def __init__(self, paths: Sequence[str | Path], cards: Sequence[str | Path] = ()) -> None:
        self._paths, self._cards = find_paths(paths), [Path(card) for card in cards]
        sources = read_sources(self._paths)
        with use_cards([*self._cards, *_find_own_cards(self._paths, self._cards)]):
            self._study = read_study(sources.logs, list_installed_cards(), sources.inputs, sources.documents)

    @property
    def runs(self) -> pd.DataFrame:
        """Return one row per log: what it states, its time split, and whether it counts."""
        return self._study.runs

    @property
    def results(self) -> pd.DataFrame:
        """Return one row per result, a group of runs: its score and means over its runs."""
        return self._study.results

    def to_pandas(self) -> pd.DataFrame:
        """Return a copy of ``results``, one row per result, to change at will."""
        return self._study.results.copy()

    @property
    def epochs(self) -> pd.DataFrame:
        """Return one row per epoch of a run."""
        return self._study.tables.epochs

    @property
    def evals(self) -> pd.DataFrame:
        """Return one row per evaluation of a run."""
        return self._study.tables.evals

    @property
    def phases(self) -> pd.DataFrame:
        """Return one row per window of steps of a run: seconds by phase."""
        return self._study.tables.phases

    @property
    def ranks(self) -> pd.DataFrame:
        """Return one row per epoch and quantity that ranks measured."""
        return self._study.tables.ranks

    @property
    def experts(self) -> pd.DataFrame:
        """Return one row per window and mixture-of-experts layer."""
        return self._study.tables.experts

    @property
    def systems(self) -> pd.DataFrame:
        """Return one row per system, as its package describes it or as a run found it."""
        return self._study.tables.systems

    @property
    def figures(self) -> tuple[str, ...]:
        """Return the names of all views of figures, in the order of a report."""
        from mlhpc.analysis.figures import list_views

        return tuple(list_views())

    def table(self, name: str) -> pd.DataFrame:
        """Return the numbers of a figure. Raises InputError for an unknown name, or without its data."""
        return _view(name).table(self._study)

    def chart(self, name: str) -> alt.TopLevelMixin:
        """Return a figure as an Altair chart: a notebook shows it, and `save` of it writes a file.

        Raises InputError for an unknown name, or without its data.
        """
        import altair as alt

        from mlhpc.analysis.drawing.charts import build_specification

        drawn: alt.TopLevelMixin = alt.Chart.from_dict(
            build_specification(_view(name).chart(self.table(name).reset_index(drop=True)))
        )
        return drawn

    def report(self, folder: str | Path, *, force: bool = False) -> Page:
        """Write what ``mlhpc report`` writes for the same paths, and return the path of the page.

        Raises InputError if the folder holds a report already, unless ``force``.
        """
        from mlhpc.analysis.commands.report import report

        # Through the command, so that both write the same files and refuse the same things
        words = [*map(str, self._paths), "-o", str(folder), *(["--force"] if force else [])]
        words += [word for card in self._cards for word in ("--card", str(card))]
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                report.main(words, "mlhpc report", standalone_mode=False)
        except click.ClickException as error:
            # The caller of a method has arguments and no options
            raise InputError(error.format_message().replace("--force replaces", "force=True replaces")) from None
        return Page(folder) / "report.html"

    @property
    def study(self) -> Study:
        """Return what the figures are made of, for a figure of one's own (docs/report.md). Not stable."""
        return self._study

    def __getitem__(self, name: object) -> NoReturn:
        raise InputError(f"results[{name!r}]: a table is an attribute, such as results.runs (docs/api.md)")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(explain_attribute(self, name))

    def __repr__(self) -> str:
        counts = f"{render_count(len(self.results), 'result')} of {render_count(len(self.runs), 'run')}"
        return f"<{counts}: {', '.join(map(str, self._paths))}>"

    def _repr_html_(self) -> str:
        times = [render_duration(each) if each == each else "" for each in self.results["score_s"]]  # NaN
        table = self.results.assign(time=times)
        table = table.sort_values(["benchmark", "size", "mode", "score_s"])[list(NOTEBOOK_COLUMNS)].rename(
            columns=NOTEBOOK_COLUMNS
        )
        text = str(table.head(MOST_ROWS).to_html(index=False, na_rep="", float_format="{:.4g}".format, escape=True))
        more = f"<p>and {len(table) - MOST_ROWS} more</p>" if len(table) > MOST_ROWS else ""
        return f"<p>{render_count(len(table), 'result')} of {render_count(len(self.runs), 'run')}</p>{text}{more}"
