"""Ceilings and work of published systems: every number has a source, the work is the workloads' own."""

import pytest
from msgspec import structs

from mlhpc.analysis.published.scores import read_scores
from mlhpc.analysis.results.names import DEVICE_FAMILY
from mlhpc.analysis.roofline.bounds import list_ceilings, predict_bounds, read_roofs
from mlhpc.suite.workload import load_workload


def test_every_number_has_a_source_that_is_written_out() -> None:
    found = read_roofs()
    for what, resource, number in list_ceilings(found):
        assert len(found.sources[number.source]) > 20, (what, resource)
    assert {number.source for _, _, number in list_ceilings(found)} == set(found.sources)


def test_devices_and_machines_are_those_of_the_published_results() -> None:
    rows, found = read_scores(), read_roofs()
    assert set(rows["device"]) <= set(found.devices)
    assert {machine.machine for machine in found.machines} <= set(rows["machine"])
    assert all(DEVICE_FAMILY.search(device) or device in set(rows["device"]) for device in found.devices)


def test_the_v100_is_the_one_of_the_first_rounds_authors() -> None:
    memory = read_roofs().devices["V100"].memory
    assert (memory.per_s, memory.origin) == (828.758e9, "literature")


def test_no_published_step_is_faster_than_its_modelled_roofs() -> None:
    rows = read_scores()
    rows = rows[(rows["mode"] == "strong") & rows["carried_over_from"].isna()]
    modelled_rows = [(row, bounds) for row in rows.to_dict("records") if (bounds := predict_bounds(row)) is not None]
    assert len(modelled_rows) > 40
    for row, found in modelled_rows:
        assert found.refused == (), row
        assert found.distance > 1
        assert all(term.demand.basis == "modelled" for term in found.terms)
        assert all(term.roof.origin != "measured" and term.roof.source for term in found.terms)


def test_cosmoflow_of_the_first_round_had_smaller_kernels() -> None:
    row = read_scores().query("round == 'v0.7' and system == 'abci_512xV100_tensorflow_closed'").iloc[0].to_dict()
    found = predict_bounds(row)
    compute = next(term for term in found.terms if term.resource == "compute")
    assert compute.demand.amount == pytest.approx(192090785280 * 8 / 27, rel=0.01)


def test_an_unknown_device_has_no_model() -> None:
    row = read_scores().iloc[0].to_dict() | {"device": "Abacus"}
    assert predict_bounds(row) is None


@pytest.mark.parametrize("name", ["cosmoflow", "deepcam", "open_catalyst", "openfold"])
def test_the_work_is_the_workloads_own(name: str) -> None:
    pytest.importorskip("torch")
    from mlhpc.suite.config import load_config
    from mlhpc.suite.descriptor import load_descriptors

    descriptor = load_descriptors()[name]
    card = descriptor.card()
    sample = read_roofs().work[card.mlperf_name]
    config = load_config(descriptor, "full", [])
    for element_bytes, precision in ((2, "bfloat16"), (4, "float32")):
        work = load_workload(descriptor)(structs.replace(config, precision=precision)).work()
        assert sample.flops == pytest.approx(min(work.model_flops, work.executed_flops), rel=1e-6)
        assert sample.bytes[element_bytes] == pytest.approx(work.algorithmic_bytes, rel=1e-3)
    size = card.size("full")
    assert (sample.parameters, sample.sample_bytes) == (size.model_parameters, size.sample_bytes)
