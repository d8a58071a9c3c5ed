"""Ramble application of mlhpc: data, scored runs, the checker's verdict, and the figures of merit (docs/exchange.md)."""

from ramble.appkit import *


class Mlhpc(ExecutableApplication):
    """Time to train a scientific workload to a target, judged by mlhpc's checker."""

    name = "mlhpc"

    tags("machine-learning", "training")

    _output = {"output_capture": OUTPUT_CAPTURE.ALL, "use_mpi": False}
    executable("data", "{mlhpc} data generate {workload_name} --size {size}", **_output)
    executable(
        "train",
        "{mlhpc} run {workload_name} --size {size} --ranks {n_ranks} --runs {runs} -o {experiment_run_dir}/run",
        **_output,
    )
    executable("figures", "{mlhpc} score {experiment_run_dir}/run --format fom || test $? = 1", **_output)
    executable("judge", '{mlhpc} check {experiment_run_dir}/run; echo "MLHPC_CHECK $?"', **_output)

    _names = ("cosmoflow", "deepcam", "moe_lm", "open_catalyst", "openfold", "swinv2_moe")
    for _name in _names:
        workload(_name, executables=["data", "train", "figures", "judge"])
    for _key, _default, _text in (
        ("mlhpc", "mlhpc", "The program"),
        ("size", "smoke", "Size of the workload (mlhpc workload list)"),
        ("runs", "5", "Scored runs; the size says how many a score needs"),
    ):
        workload_variable(_key, default=_default, description=_text, workloads=list(_names))

    _line = r"^MLHPC_FOM 1 (?P<result>\S+) (?P<key>[a-z0-9_]+) (?P<value>-?[0-9][0-9.e+-]*) (?P<unit>\S+)$"
    for _key, _unit in (
        *((key, "1") for key in ("valid", "compliant", "errors", "runs_converged")),
        *((key, "min") for key in ("score", "score_with_staging")),
        *((f"time_to_train_{key}", "s") for key in ("mean", "min", "max", "std")),
    ):
        figure_of_merit(
            _key,
            fom_regex=_line.replace("(?P<key>[a-z0-9_]+)", _key),
            group_name="value",
            units=_unit,
        )

    success_criteria("compliant", mode="string", match=r"^MLHPC_CHECK 0$")
