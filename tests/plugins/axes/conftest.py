"""Data sets of workloads, as their own tests have them."""

from tests.workloads.conftest import made_once as made_once
from tests.workloads.conftest import world as world
