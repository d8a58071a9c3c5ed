"""Distinguishes users' errors from our own, and says what to do about them."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping

from mlhpc.suite import VERSION
from mlhpc.suite.meanings import find_same_meaning

DEBUG = "MLHPC_DEBUG"  # environment variable: show the traceback of a defect instead of writing it to a file


class InputError(ValueError):
    """A file, value or setting from outside is wrong. One line says where, what was found and what was expected.

    `mlhpc.suite.cli` prints it and exits with code 2. Every other exception is a defect of mlhpc itself (exit code 70),
    also a ValueError of Python, NumPy or PyTorch. Parsers of user files convert such errors to InputError and add the
    place.
    """


# What NumPy, PyTorch, CUDA and the C++ library say where an allocation fails; only two of them have a class for it.
NO_MEMORY = re.compile(
    r"can't allocate memory|Cannot allocate memory|\bMemoryError\b|Unable to allocate|out of memory|std::bad_alloc"
    r"|Storage size calculation overflowed"
)


def is_of_memory(error: BaseException) -> bool:
    """Return True if an error says that the machine lacks the requested memory."""
    return isinstance(error, MemoryError) or NO_MEMORY.search(str(error)) is not None


# What programs say at a limit of this shell or job: its number, what it counts, and the command that shows and sets it
LIMITS: tuple[tuple[str, int, str, str], ...] = (
    (
        r"can't start new thread|pthread_create|[Tt]hread creation failed|[Uu]nable to fork|fork failed"
        r"|Resource temporarily unavailable",
        resource.RLIMIT_NPROC,
        "processes and threads of this user at once",
        "ulimit -u",
    ),
    (r"Too many open files", resource.RLIMIT_NOFILE, "open files of a process", "ulimit -n"),
    (r"File size limit exceeded|SIGXFSZ", resource.RLIMIT_FSIZE, "blocks of a file", "ulimit -f"),
    (r"CPU time limit exceeded|SIGXCPU", resource.RLIMIT_CPU, "seconds of CPU time of a process", "ulimit -t"),
    (NO_MEMORY.pattern, resource.RLIMIT_AS, "bytes of memory of a process", "ulimit -v"),
    (NO_MEMORY.pattern, resource.RLIMIT_DATA, "bytes of data of a process", "ulimit -d"),
)


def explain_limit(said: str) -> str:
    """Return which limit of this shell or job a message is about, with its value and what to do. "" if none is."""
    for pattern, number, what, command in LIMITS:
        if not re.search(pattern, said):
            continue
        most = resource.getrlimit(number)[0]
        if most != resource.RLIM_INFINITY:
            return f"this shell or job allows at most {most:,} {what} ({command}): raise it, or end others that count"
        if number == resource.RLIMIT_NPROC:
            return f"there may be no more {what} ({command}, or pids.max of its control group): raise it, or end others"
    return ""


def explain_variable(said: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return which variable a library refuses, and the command without it. Such a message has its name."""
    for name, value in environ.items():
        if "_" in name and value and re.search(rf"\b{re.escape(name)}\b", said):
            return f"{name} of this shell is {value[:40]!r}; without it: env -u {name} mlhpc …"
    return ""


# What pyproject.toml declares: module -> the package to install, and the extra of mlhpc that has it ("": all need it)
PACKAGES = {
    "yaml": ("pyyaml", ""),
    "click": ("click", ""),
    "rich": ("rich", ""),
    "jinja2": ("jinja2", ""),
    "msgspec": ("msgspec", ""),
    "psutil": ("psutil", ""),
    "torch": ("torch", "run"),
    "mpi4py": ("mpi4py", "run"),
    "h5py": ("h5py", "run"),
    "numpy": ("numpy", "run"),
    "scipy": ("scipy", "run"),
    "google_crc32c": ("google-crc32c", "run"),
    "gemmi": ("gemmi", "openfold-data"),
    "ase": ("ase", "open-catalyst"),
    "matscipy": ("matscipy", "open-catalyst"),
    "lmdb": ("lmdb", "open-catalyst"),
    "pandas": ("pandas", "analysis"),
    "altair": ("altair", "analysis"),
    "vl_convert": ("vl-convert-python", "analysis"),
    "pyarrow": ("pyarrow", "parquet"),
    "lifelines": ("lifelines", "fleet"),
    "pynvml": ("nvidia-ml-py", "nvml"),
    "tensorboard": ("tensorboard", "export"),
    "prometheus_client": ("prometheus-client", "export"),
    "mlflow": ("mlflow-skinny", "mlflow"),
    "triton": ("triton", "kernels"),
    "safetensors": ("safetensors", "offload"),
    "PIL": ("pillow", "numerics"),
    "cv2": ("opencv-python-headless", "numerics"),
    "simplejpeg": ("simplejpeg", "numerics"),
    "mlperf_logging": ("mlperf_logging", "official"),
    "optuna": ("optuna", "tune"),
    "sklearn": ("scikit-learn", "tune"),
    "ray": ("ray", "ray"),
    "monarch": ("torchmonarch", "monarch"),
}


def find_pip_requirement(module: str) -> str:
    """Return what pip must install for a module of `PACKAGES`: an extra of mlhpc, or the package."""
    package, extra = PACKAGES[module]
    return f"'mlhpc[{extra}]'" if extra else package


def explain_not_installed(module: str) -> str:
    """Return the clause that a package of `PACKAGES` is not installed, with the command that installs it."""
    return f"{PACKAGES[module][0]} is not installed (pip install {find_pip_requirement(module)})"


def explain_missing(error: BaseException) -> str:
    """Return one line if a declared package is not installed; "" for any other error."""
    # The name of a module inside a package has a dot: such a package is installed, and is damaged or of another version
    if not isinstance(error, ModuleNotFoundError) or error.name not in PACKAGES:
        return ""
    return f"the Python package {explain_not_installed(error.name)}; this Python is {sys.executable}"


def find_near(name: str, known: Iterable[str]) -> str | None:
    """Find the nearest of the known names, ignoring case. None if none is near."""
    each = {item.lower(): item for item in known}
    near = difflib.get_close_matches(name.lower(), each, 1)
    return each[near[0]] if near else None


def explain_near_names(name: str, known: Iterable[str]) -> str:
    """Return the clause "did you mean" with the known names that contain the given one, else the nearest.

    The nearest in meaning comes first. Empty if none is near, or if more than three contain it and none is nearest.
    """
    names = list(known)
    if alike := find_same_meaning(name, names):
        return f"; did you mean {alike!r}?"
    # Shorter texts are part of too many names.
    holding = [each for each in names if len(name) >= 4 and _letters(name) in _letters(each)]
    same = [each for each in holding if _letters(each) == _letters(name)]
    near = same or holding if 0 < len(holding) <= 3 else [each for each in (find_near(name, names),) if each]
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def explain_unknown_name(kind: str, name: str, known: Iterable[str], more: str = "") -> str:
    """Return the message about an unknown name: the nearest one and all known ones.

    ``more``: what else would be valid.
    """
    names = list(known)
    near = explain_near_names(name, names)
    # The plural of axis is axes.
    kinds = f"{kind.removesuffix('is')}es" if kind.endswith("is") else f"{kind}s"
    return f"unknown {kind} {name!r}{near or ';'} {kinds}: {', '.join(names) or 'none'}" + (f"; {more}" if more else "")


def explain_call(function: Callable[..., object], name: str, error: TypeError) -> str:
    """Return the message for a call with other arguments than a function has: which was meant, and how it is called."""
    signature = inspect.signature(function)
    known = [each for each in signature.parameters if each != "self"]
    form = ", ".join(
        "*" * (each.kind is each.VAR_POSITIONAL) + key + "=…" * (each.default is not each.empty)
        for key, each in signature.parameters.items()
        if key != "self"
    )
    text = re.sub(r"^[\w.<>]+\(\) ", "", str(error))
    near = ""
    if found := re.search(r"unexpected keyword argument '(\w+)'", text):
        in_config = f"; settings stand in the configuration: config={{'{found[1]}': …}}" if "config" in known else ""
        near = explain_near_names(found[1], known) or in_config
    return f"{name}: {text}{near.rstrip('?')}; call {name}({form})"


def explain_attribute(thing: object, name: str) -> str:
    """Return the message for an attribute that an object does not have: the nearest one, and all that it has."""
    known = sorted(each for each in {*dir(type(thing)), *vars(thing)} if not each.startswith("_"))
    near = explain_near_names(name, known) or ";"
    return f"{type(thing).__name__!r} object has no attribute {name!r}{near} it has {', '.join(known)}"


def write_traceback(to: str = "") -> str:
    """Write the traceback of the exception being handled, with context for a maintainer, to a new file.

    Returns a phrase that says where it is, and ``to`` whom it goes. The file is in the folder for temporary files
    (TMPDIR).
    """
    lines = (f"mlhpc {VERSION}, Python {sys.version.split()[0]}", f"command: {sys.argv}", traceback.format_exc())
    try:
        # Not deleted: a person reads it after the command has ended.
        with tempfile.NamedTemporaryFile(
            "w", prefix=f"mlhpc-defect-{time.strftime('%Y%m%d-%H%M%S')}-", suffix=".txt", delete=False
        ) as file:
            file.write("\n".join(lines))
    except OSError as error:
        return f"the traceback cannot be kept: {error.strerror}; {DEBUG}=1 shows it"
    return f"please report it{to} with {file.name}"
