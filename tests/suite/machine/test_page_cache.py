"""The state of the page caches: dropped only where the command succeeded on every node, cold where no memory holds the data."""

import sys

import pytest

from mlhpc.suite.machine.page_cache import CacheState, drop_page_caches
from mlhpc.suite.world import World

OK = f"{sys.executable} -c pass"
PETABYTE = 10**15


@pytest.mark.parametrize(
    ("command", "data_bytes", "environ", "state", "exit_codes"),
    [
        (OK, 1, {}, "dropped", (0,)),
        (f"{sys.executable} -c 'raise SystemExit(3)'", 1, {}, "unverified", (3,)),
        ("/no/such/program", 1, {}, "unverified", (127,)),
        ("an 'open quote", 1, {}, "unverified", (127,)),
        (None, 1, {}, "unverified", ()),
        (None, PETABYTE, {}, "cold-by-size", ()),
        (None, 1, {"MLHPC_CACHE_DROP_COMMAND": "drop", "MLHPC_CACHE_DROP_RC": "0"}, "dropped", (0,)),
        (OK, 1, {"MLHPC_CACHE_DROP_COMMAND": "drop", "MLHPC_CACHE_DROP_RC": "-1"}, "unverified", (-1,)),
        (OK, 1, {"MLHPC_CACHE_DROP_COMMAND": "drop"}, "unverified", ()),
    ],
)
def test_caches_are_dropped_only_if_the_command_succeeded(
    command: str | None, data_bytes: int, environ: dict[str, str], state: str, exit_codes: tuple[int, ...]
) -> None:
    found = drop_page_caches(command, data_bytes, World.create(), environ)
    reported = environ.get("MLHPC_CACHE_DROP_COMMAND", command)
    assert found == CacheState(state, reported, exit_codes, data_bytes, found.memory_bytes)  # type: ignore[arg-type]
