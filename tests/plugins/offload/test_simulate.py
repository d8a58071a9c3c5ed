"""The simulator's hits are those of naive caches, and Belady's are the most."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mlhpc.plugins.offload.command import offload
from mlhpc.plugins.offload.simulate import HALF_LIFE, POLICIES, Trace, count_hits, make_zipf, read_popularity
from mlhpc.suite.errors import InputError


def count_naively(trace: Trace, size: int, policy: str) -> int:
    """A list of what is kept; at each miss all of it is looked at."""
    kept: list[int] = []
    last, count, decayed, hits = {}, dict[int, int](), dict[int, float](), 0
    uses: dict[int, list[int]] = {}
    for time, entry in reversed(list(enumerate(trace))):
        uses.setdefault(entry, []).append(time)
    for time, entry in enumerate(trace):
        uses[entry].pop()
        if entry in kept:
            hits += 1
        else:
            if len(kept) == size:
                worth = {
                    "LRU": lambda each: (last[each],),
                    "LFU": lambda each: (count[each], last[each]),
                    "decayed LFU": lambda each: (decayed[each] * 0.5 ** ((time - last[each]) / (HALF_LIFE * size)),),  # noqa: B023
                    "Belady": lambda each: (-uses[each][-1] if uses[each] else -len(trace),),
                }[policy]
                kept.remove(min(kept, key=worth))
            kept.append(entry)
        if entry in decayed:
            decayed[entry] *= 0.5 ** ((time - last[entry]) / (HALF_LIFE * size))
        decayed[entry] = decayed.get(entry, 0.0) + 1
        last[entry], count[entry] = time, count.get(entry, 0) + 1
    return hits


def make_traces(requests: int) -> dict[str, Trace]:
    generator = np.random.default_rng(4)
    moving = (generator.zipf(1.3, requests) + np.arange(requests) // 700) % 40
    return {
        "steps": make_zipf(1.1, 3, 12, 40, 1).draw(4, requests, generator),
        "independent": (generator.zipf(1.2, requests) % 50).tolist(),
        "moving": moving.tolist(),
        "in a circle": [number % 13 for number in range(requests)],
    }


def check(requests: int, names: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    traces = make_traces(requests)
    for name in names:
        trace = traces[name]
        for size in sizes:
            hits = {policy: count_hits(trace, size, make(trace, size)) for policy, make in POLICIES.items()}
            assert hits == {policy: count_naively(trace, size, policy) for policy in POLICIES}, (name, size)
            assert max(hits.values()) == hits["Belady"], (name, size)


def test_hits_are_those_of_naive_caches() -> None:
    check(1500, ("steps", "independent", "moving", "in a circle"), (1, 9, 20))


@pytest.mark.long
def test_hits_are_those_of_naive_caches_for_a_million_requests() -> None:
    check(1_000_000, ("moving",), (9,))


def test_the_popularity_of_a_log_is_its_load(tmp_path: Path) -> None:
    log = tmp_path / "result_0.txt"
    load = {"blocks.0": {"tokens_per_expert": [30, 10]}, "blocks.1": {"tokens_per_expert": [0, 40]}}
    event = {
        "namespace": "",
        "time_ms": 1,
        "event_type": "POINT_IN_TIME",
        "key": "window_stats",
        "value": {"load": load},
    }
    lines = [f":::MLLOG {json.dumps(event | {'metadata': {'steps': 2, 'file': 'x', 'lineno': 1}})}"] * 2
    log.write_text("\n".join(lines) + "\n")
    found = read_popularity(log)
    assert [each.tolist() for each in found.shares] == [[0.75, 0.25], [0, 1]]
    assert found.choices == 20
    trace = found.draw(1, 400, np.random.default_rng(0))
    assert set(trace) == {0, 1, 3}
    done = CliRunner().invoke(offload, ["simulate", str(log), "--cache", "50%", "--ranks", "2048", "--requests", "500"])
    assert done.output.startswith("simulation, nothing is measured: loads of ")
    assert "8 of 2,048 ranks" in done.output
    log.write_text("")
    with pytest.raises(InputError, match="has no window_stats with the load of experts"):
        read_popularity(log)
