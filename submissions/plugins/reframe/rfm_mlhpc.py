"""ReFrame test of one mlhpc workload: the checker says whether it is sane, the figures of merit are its performance.

    reframe -C site.py -c rfm_mlhpc.py -r -S workload=cosmoflow -S size=mini -S runs=10 -S tasks=64

The partition's launcher starts each trial; a partition with launcher ``local`` runs one rank. Nothing is compared with stored
references: `mlhpc history` and `mlhpc compare` judge differences with their uncertainty.
"""

import json
import shlex
from pathlib import Path

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.builtins import run_before, sanity_function, variable


@rfm.simple_test
class MlhpcWorkload(rfm.RunOnlyRegressionTest):
    """Scored runs of one workload and size."""

    workload = variable(str, value="moe_lm")
    size = variable(str, value="smoke")
    runs = variable(int, value=5)
    tasks = variable(int, value=1)
    tasks_per_node = variable(int, value=0)
    settings = variable(str, value="")  # KEY=VALUE, separated by commas: what `mlhpc run --set` takes
    launcher_options = variable(str, value="")  # for example --mpi=pmi2
    program = variable(str, value="mlhpc")

    descr = "mlhpc: time to train to a target"
    valid_systems = ["*"]
    valid_prog_environs = ["*"]
    time_limit = "1h"
    tags = {"mlhpc", "training"}

    @run_before("run")
    def start_every_trial(self) -> None:
        """The data first, by one process; then a trial after the other, each by the launcher; then the verdict."""
        self.num_tasks = self.tasks
        if self.tasks_per_node:
            self.num_tasks_per_node = self.tasks_per_node
        self.job.launcher.options += shlex.split(self.launcher_options)
        subject = [self.workload, "--size", self.size]
        settings = [word for item in filter(None, self.settings.split(",")) for word in ("--set", item)]
        trials = [
            [
                self.program,
                "run",
                *subject,
                *settings,
                "--runs",
                str(self.runs),
                "--output",
                "run",
                "--trial",
                str(trial),
            ]
            for trial in range(self.runs)
        ]
        launcher = self.job.launcher.run_command(self.job)
        self.executable, *self.executable_opts = trials.pop()
        self.prerun_cmds = [
            shlex.join([self.program, "data", "generate", *subject]),
            *(f"{launcher} {shlex.join(trial)}" for trial in trials),
        ]
        self.postrun_cmds = [
            f'{self.program} check run; echo "MLHPC_CHECK $?"',
            f"{self.program} score run --format json > score.json",
        ]

    @sanity_function
    def the_checker_finds_no_error(self):  # noqa: ANN201 (a deferred expression of ReFrame's)
        """The checker's exit code is 0."""
        return sn.assert_found(
            r"^MLHPC_CHECK 0$", self.stdout, "mlhpc check found an error: see the output of the test"
        )

    @run_before("performance")
    def take_the_figures_of_merit(self) -> None:
        """Every figure that is better when it is lower or higher, with its unit."""
        groups = json.loads((Path(self.stagedir) / "score.json").read_text(encoding="utf-8"))["groups"]
        self.perf_variables = {
            figure["key"]: sn.make_performance_function(sn.defer(figure["value"]), figure["unit"])
            for group in groups
            for figure in group["figures"]
            if figure["better"] is not None
        }
