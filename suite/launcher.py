"""Which launcher started this process: is it a rank of srun, mpiexec or torchrun, or a command in a person's shell?

Every command that uses ranks asks `find_world`. Only the environment is looked at, and nothing heavy is imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from suite.errors import InputError

# Rank and size variables of each launcher. The first pair that is set counts: an inner launcher stands before an outer
# one
LAUNCHERS: tuple[tuple[str, str, str], ...] = (
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("pmi", "PMI_RANK", "PMI_SIZE"),
    ("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # srun sets STEP_ variables, the batch script has none
)
# Variables by which a launcher speaks to its ranks, and a scheduler to mpiexec. A user's own settings are not among
# them: HYDRA_*, MPICH_*, most of OMPI_MCA_*
_OF_LAUNCHERS = re.compile(
    r"(?:SLURM|PMI|PMIX|PRTE|PALS|FLUX|HYDI|TORCHELASTIC|PBS|LSB|COBALT)_.*|PE_HOSTFILE|OMPI_(?!MCA_).*"
    r"|OMPI_MCA_(?:orte|prte|ess|pmix|initial).*|MPI_LOCALN?RANK(?:S|ID)|MV2_COMM_WORLD_.*"
    r"|(?:(?:LOCAL|GROUP|ROLE)_)?(?:RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(?:ADDR|PORT)"
)


@dataclass(frozen=True)
class Launch:
    """The launcher that started this process, and its rank and number of ranks by the launcher's variables."""

    launcher: str
    rank: int
    size: int


def detect(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """Find the launcher that started this process, or None. InputError if its variables are inconsistent."""
    for launcher, rank_name, size_name in _pairs(environ):
        given = f"{rank_name}={environ[rank_name]!r} and {size_name}={environ[size_name]!r}"
        try:
            rank, size = int(environ[rank_name]), int(environ[size_name])
        except ValueError:
            raise InputError(f"{given}: expected integers; {way_out(environ)}") from None
        if not 0 <= rank < size:
            raise InputError(f"{given}: expected a rank below the number of ranks; {way_out(environ)}")
        return Launch(launcher, rank, size)
    return None


def find_world(ranks: int | None, environ: Mapping[str, str] = os.environ) -> Launch | None:
    """The launch whose ranks a command with ``--ranks`` is one of. None: it starts so many ranks here itself.

    A launcher of one rank is a person's shell where more are asked for: an interactive step of Slurm, a container.
    InputError if a launcher started several ranks, and another number is asked for.
    """
    launch = detect(environ)
    if launch is None or ranks in (None, 1, launch.size):
        return launch
    if launch.size == 1:
        return None
    raise InputError(f"--ranks {ranks}: {explain(environ)}: leave --ranks out; {way_out(environ)}")


def refuse_several(what: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise InputError where a launcher started several ranks, each of which would do what one command does."""
    launch = detect(environ)
    if launch is not None and launch.size > 1:
        raise InputError(f"{explain(environ)}, and {what}; {way_out(environ)}")


def explain(environ: Mapping[str, str] = os.environ) -> str:
    """What the environment says of the launcher of this process, with the variables that say it."""
    launch = detect(environ)
    if launch is None:
        return "no launcher: a command in a shell"
    _, rank_name, size_name = _pairs(environ)[0]
    ranks = "the only rank" if launch.size == 1 else f"rank {launch.rank} of {launch.size} ranks"
    return f"{launch.launcher} started this process as {ranks} ({rank_name}={launch.rank} {size_name}={launch.size})"


def way_out(environ: Mapping[str, str] = os.environ) -> str:
    """What to type in a shell to which a launcher's variables came by themselves."""
    return f"in a shell of your own: env {' '.join(f'-u {rank_name}' for _, rank_name, _ in _pairs(environ))} mlhpc …"


def without_launchers(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of launchers and schedulers.

    With them an mpiexec would start its ranks through the scheduler, and a rank would connect to the outer launcher.
    """
    return {name: value for name, value in environ.items() if not _OF_LAUNCHERS.fullmatch(name)}


def _pairs(environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    return [each for each in LAUNCHERS if each[1] in environ and each[2] in environ]
