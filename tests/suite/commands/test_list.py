"""`mlhpc workload list`: every workload with its sizes, as the cards say."""

import json

from mlhpc.suite.descriptor import load_descriptors
from tests.fixtures.cli import mlhpc


def test_every_size_of_every_card_is_listed_with_its_target() -> None:
    listed = {item["workload"]: item for item in json.loads(mlhpc("workload", "list", "--format", "json").stdout)}
    for name, item in load_descriptors().items():
        for size, card in item.card().sizes.items():
            shown = listed[name]["sizes"][size]
            assert (shown["threshold"], shown["required_runs"]) == (card.threshold, card.required_runs)
            assert shown["data_bytes"] == (card.train_samples + card.eval_samples) * card.sample_bytes


def test_the_text_names_workload_sizes_and_targets() -> None:
    text = mlhpc("workload", "list", "cosmoflow").stdout
    assert text.startswith("cosmoflow  ")
    assert "<= 0.124" in text
    assert [line.split()[0] for line in text.splitlines()[2:]] == list(load_descriptors()["cosmoflow"].card().sizes)


def test_an_unknown_workload_is_answered_with_those_there_are() -> None:
    done = mlhpc("workload", "list", "cosmofow")
    assert done.returncode == 2
    assert done.stderr.startswith("mlhpc: unknown workload 'cosmofow'; did you mean 'cosmoflow'? workloads: ")
