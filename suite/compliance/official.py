"""Runs MLCommons' own tools on a copy, in a subprocess, and parses their text: their exit code hides failures.

Their tools execute files that a log names and write into the folders they judge. So they get only a copy, and no log
whose names are not plain words. Complaints that follow from the size of a benchmark are listed apart, with the reason.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mlhpc.suite.card import OfficialRules
from mlhpc.suite.compliance.official_rules import render_official_rules
from mlhpc.suite.compliance.ruleset import LAST_ROUND, Benchmark, Ruleset, read_ruleset
from mlhpc.suite.compliance.selection import select_ruleset
from mlhpc.suite.errors import InputError
from mlhpc.suite.log.reader import Log, read_events
from mlhpc.suite.log.record import summarise_log
from mlhpc.suite.log.results_tree import Group, find_results, list_system_files
from mlhpc.suite.log.score import find_failure

TOOLS_VERSION = "4.1.68"
# The last round of MLPerf HPC that the tools know.
TOOLS_ROUND = "3.0.0"
_TIMEOUT_S = 300
_TIMEOUT_MESSAGE = (
    f"stopped after {_TIMEOUT_S} s without a verdict, which is none against the results: try on a less busy machine"
)
# The tools format these values into names of files that they open.
_PATH_KEYS = ("submission_division", "submission_benchmark", "scheduler_type")


@dataclass(frozen=True)
class OfficialRun:
    """One run of one tool. ``expected`` complaints follow from the size, each with its reason."""

    tool: str
    subject: str
    complaints: tuple[str, ...]
    expected: tuple[str, ...] = ()

    @property
    def accepted(self) -> bool:
        """True if the tool has no complaint but expected ones."""
        return not self.complaints

    @property
    def answered(self) -> bool:
        """False if the tool was stopped before it came to a verdict."""
        return _TIMEOUT_MESSAGE not in self.complaints

    def lines(self) -> list[str]:
        """Render the verdict, then the complaints, for people."""
        verdict = "accepted" if self.accepted else "REJECTED" if self.answered else "no answer"
        return [
            f"  {verdict}  {self.tool}: {self.subject}",
            *(f"    error: {complaint}" for complaint in self.complaints),
            *(f"    known: {reason}" for reason in dict.fromkeys(self.expected)),
        ]


@dataclass(frozen=True)
class OfficialVerdict:
    """The results of all tools."""

    runs: tuple[OfficialRun, ...]
    version: str

    @property
    def accepted(self) -> bool:
        """True if something was judged and every tool accepts it, apart from expected complaints."""
        return bool(self.runs) and all(run.accepted for run in self.runs)

    def text(self) -> str:
        """Render one line per run of a tool, then its complaints, for people."""
        lines = [f"official: mlperf_logging {self.version}, on a copy"]
        for run in self.runs:
            lines += run.lines()
        if not self.runs:
            lines.append("  nothing was judged")
        return "\n".join(lines)


def run_official(paths: Sequence[Path]) -> OfficialVerdict:
    """Judge everything under the paths with mlperf_logging. InputError if the pinned version is not installed."""
    try:
        installed = version("mlperf_logging")
    except PackageNotFoundError:
        installed = "none"
    # Their text is parsed below, and other versions print other text.
    if installed != TOOLS_VERSION:
        raise InputError(
            f"--official needs mlperf_logging {TOOLS_VERSION}, found {installed}; "
            "install it with: pip install 'mlhpc[official]'"
        )
    runs: list[OfficialRun] = []
    for path in paths:
        tree = find_results(path)
        for group in tree.groups:
            runs += _judge_logs(group)
        for package in tree.packages:
            runs += _judge_package(package, [group for group in tree.groups if group.package == package])
    return OfficialVerdict(tuple(runs), installed)


# One log


def _judge_logs(group: Group) -> Iterator[OfficialRun]:
    """Run compliance_checker on every log of a group: our logs are judged by generated rules, others by theirs."""
    rules = read_ruleset(select_ruleset([group], group.folder).name or LAST_ROUND)
    for path in group.logs:
        log = read_events(path)
        record = summarise_log(log)
        benchmark = rules.benchmark(record.benchmark, record.size)
        if not _has_plain_names(log) or benchmark is None:
            yield OfficialRun(
                "compliance_checker",
                str(path),
                (_UNSAFE_NAME_MESSAGE if not _has_plain_names(log) else "unknown benchmark",),
            )
            continue
        options = ["--usage", "hpc", "--ruleset", _find_tools_round(rules)]
        with tempfile.TemporaryDirectory(prefix="mlhpc-official-") as folder:
            copy = Path(shutil.copyfile(path, Path(folder) / path.name))
            if not rules.foreign:
                config = Path(folder) / "rules.yaml"
                config.write_text(render_official_rules(benchmark, record.division or "closed"), encoding="utf-8")
                options += ["--config", str(config)]
            text = _run_tool(Path(folder), "compliance_checker", *options, str(copy))
        complaints = tuple(_parse_complaints(text))
        expected: tuple[str, ...] = ()
        if find_failure(record, benchmark) is not None and len(group.logs) > 1:
            # One run of a result may fail; their tool judges each log as if it were the only one.
            expected = tuple(f"{complaint} (a run that did not converge)" for complaint in complaints)
            complaints = ()
        judge = f"generated rules, {benchmark.size}" if benchmark.size else f"hpc {rules.name}"
        yield OfficialRun(f"compliance_checker ({judge})", str(path), complaints, expected)


# A package


def _judge_package(package: Path, groups: Sequence[Group]) -> Iterator[OfficialRun]:
    """Run system_desc_checker on every system description, and package_checker on the whole package."""
    logs = [read_events(path) for group in groups for path in (*group.logs, *group.pruned)]
    if not logs or not all(_has_plain_names(log) for log in logs):
        yield OfficialRun("package_checker", str(package), (_UNSAFE_NAME_MESSAGE if logs else "no logs",))
        return
    rules = read_ruleset(select_ruleset(groups, package).name or LAST_ROUND)
    with tempfile.TemporaryDirectory(prefix="mlhpc-official-") as folder:
        copy = Path(folder) / "package"
        shutil.copytree(package, copy, symlinks=True, ignore=_list_links)
        for path in list_system_files(copy):
            text = _run_tool(Path(folder), "system_desc_checker", str(path), "hpc", TOOLS_ROUND)
            yield OfficialRun("system_desc_checker", f"systems/{path.name}", tuple(_parse_system_complaints(text)))
        text = _run_tool(Path(folder), "package_checker", str(copy), "hpc", _find_tools_round(rules))
    benchmarks = []  # whose size explains complaints
    for record in map(summarise_log, logs if not rules.foreign else ()):
        benchmark = rules.benchmark(record.benchmark, record.size)
        if benchmark is not None:
            benchmarks.append(benchmark)
    yield _judge_package_text(package, text, benchmarks)


def _judge_package_text(package: Path, text: str, benchmarks: Sequence[Benchmark]) -> OfficialRun:
    complaints = list(_parse_complaints(text))
    if _TIMEOUT_MESSAGE not in complaints and "FOUND NO ERRORS, SUCCESS" not in text and "FOUND ERRORS" not in text:
        complaints.append(f"no verdict: {text.strip().splitlines()[-1] if text.strip() else 'no output'}")
    expected: list[str] = []
    other: list[str] = []
    for complaint in complaints:
        reasons = [
            reason for reason in (_explain_complaint(complaint, benchmark) for benchmark in benchmarks) if reason
        ]
        if reasons:
            expected.append(f"{complaint}: {reasons[0]}")
        else:
            other.append(complaint)
    # Their last complaint only sums up the others.
    if expected and all("directory cannot be accepted" in complaint for complaint in other):
        expected += [f"{complaint}: follows from the above" for complaint in other]
        other = []
    return OfficialRun("package_checker (hpc 3.0.0)", str(package), tuple(dict.fromkeys(other)), tuple(expected))


def _explain_complaint(complaint: str, benchmark: Benchmark) -> str | None:
    """Return why a complaint follows from a size that is not the MLPerf configuration. None if it does not."""
    card = benchmark.card
    if card is None or (card.official is not None and card.official.identical):
        return None
    name = f"size {benchmark.size}"
    official = card.official
    if complaint.startswith(f"Failed checks for {benchmark.metric}"):
        theirs = f"MLPerf has {official.threshold:g}" if official else "MLPerf HPC has no such benchmark"
        return f"{name} has target {benchmark.threshold:g} where {theirs}: {card.description}"
    if re.match(r"CHECK for '(train|eval)_samples' failed", complaint):
        return f"{name} has {card.train_samples} + {card.eval_samples} samples"
    if complaint.startswith("RCP Test Failed"):
        return f"MLPerf's reference points are of its own configuration, not of {name}"
    if re.match(rf"Incorrect number of files .* found {benchmark.required_runs}, ", complaint):
        return f"{name} needs {benchmark.required_runs} runs where MLPerf needs {_describe_required_runs(official)}"
    instances = re.match(r"Expected at least \d+ runs, but detected (\d+) runs", complaint)
    if instances and int(instances[1]) >= benchmark.required_runs:
        return (
            f"{name} needs {benchmark.required_runs} instances where MLPerf needs {_describe_required_runs(official)}"
        )
    return None


def _describe_required_runs(official: OfficialRules | None) -> str:
    return str(official.required_runs) if official else "others: it has no such benchmark"


# Their text


_UNSAFE_NAME_MESSAGE = (
    "not given to the official tool: a name in a log is not a plain word, and the tool would open it as a path"
)


def _has_plain_names(log: Log) -> bool:
    """Return True if all values that their rules format into file names are plain words."""
    named = (event.value for event in log.events if event.key in _PATH_KEYS)
    return all(isinstance(value, str) and re.fullmatch(r"\w{1,40}", value) for value in named)


def _run_tool(folder: Path, name: str, *arguments: str) -> str:
    """Run one of their modules in ``folder`` and return its stdout and stderr as one text."""
    command = [sys.executable, "-m", f"mlperf_logging.{name}", *arguments]
    if name != "system_desc_checker":  # the only one without a log file
        command += ["--log_output", str(folder / "tool.log")]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"ERROR - {_TIMEOUT_MESSAGE}"
    text = done.stdout + done.stderr
    return text if done.returncode == 0 or "FAILED" in text else f"{text}\nERROR - exit code {done.returncode}"


_NOISE = re.compile(
    r"accepting this under olympic scoring|some do not conform|Unknown files|Marking as infinite"
    r"|Required EXACTLY_ONE occurrence of .* but found \d+$"
)


def _parse_complaints(text: str) -> Iterator[str]:
    """Parse their errors, one line each: messages of the engine (dashed blocks) and lines logged as ERROR."""
    for block in re.split(r"^-{30}$", text, flags=re.MULTILINE):
        # A block has the message of a failed check first and the expression that failed on a later line.
        test = re.search(r"^(?:(?:WARNING|ERROR) -)?\s*failed test:(.*)$", block, flags=re.MULTILINE)
        for line in block.splitlines():
            plain = re.sub(r"^(?:WARNING|ERROR) -\s*", "", line).strip()
            error = line.startswith("ERROR -") and plain not in ("FAILED", "")
            if not (error or plain.startswith(_ENGINE_MESSAGES)) or _NOISE.search(plain):
                continue
            asked = f" {test[1].strip()}" if test and plain.startswith("CHECK for") else ""
            yield re.sub(r"/\S*/package/", "", re.sub(r" in line \d+:$", ":", plain)) + asked.rstrip()
    if "Traceback" in text:
        yield f"their tool crashed: {text.strip().splitlines()[-1]}"


_ENGINE_MESSAGES = (
    *("CHECK for ", "Failed checks for ", "Failed executing", "Required ", "No log lines"),
    *("Log lines had parsing errors", "Could not find config file"),
)


def _parse_system_complaints(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if re.search(r"missing|required field|ERROR|Error|invalid", line, re.IGNORECASE):
            yield line.strip().removeprefix("ERROR - ")


def _list_links(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if (Path(folder) / name).is_symlink()]


def _find_tools_round(rules: Ruleset) -> str:
    """Return the round by which their tools judge."""
    # Our ruleset extends the last round. For v0.7 and Training the tools have no rules of HPC.
    if not rules.foreign:
        return TOOLS_ROUND
    return rules.name if rules.name in ("1.0.0", "2.0.0", "3.0.0") else "1.0.0"
