"""What tests of choices set for the whole process does not outlive them."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def process_as_before() -> Iterator[None]:
    """Threads and oneDNN are as before when the test ends."""
    from mlhpc.suite.machine.choice.layout import keep_process_settings

    with keep_process_settings():
        yield
