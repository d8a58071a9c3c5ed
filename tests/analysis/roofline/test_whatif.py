"""Predictions: what stays, what scales, and bands that hold the prediction."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlhpc.analysis.roofline.whatif import (
    MODEL_ERROR,
    PHASE_RESOURCES,
    Prediction,
    compute_phase_factor,
    make_exact_prediction,
    predict,
    predict_solution,
    sum_phases,
)

STEP = {"data_wait": 0.1, "forward_backward": 6.0, "exposed_communication": 1.0, "optimizer": 0.5, "other": 0.4}
HERE = {"compute": 2.0, "memory": 1.0, "all_reduce": 0.5, "update": 0.1}


def test_the_same_ceilings_predict_the_same_step() -> None:
    made = sum_phases(predict(STEP, HERE, HERE))
    assert made.seconds == pytest.approx(sum(STEP.values()))
    carried = MODEL_ERROR * (STEP["forward_backward"] + STEP["optimizer"])
    assert made.low_s == pytest.approx(made.seconds - carried)
    assert made.high_s == pytest.approx(made.seconds + carried)


def test_a_machine_twice_as_fast_in_everything_halves_what_its_roofs_bound_and_keeps_the_rest() -> None:
    made = predict(STEP, HERE, {name: value / 2 for name, value in HERE.items()})
    seconds = {phase.name: phase.predicted.seconds for phase in made}
    assert seconds == pytest.approx(
        {"data_wait": 0.1, "forward_backward": 3.0, "exposed_communication": 0.5, "optimizer": 0.25, "other": 0.4}
    )
    assert {phase.name for phase in made if phase.because == "kept"} == {"data_wait", "other"}
    passes = made[1].predicted
    assert passes.low_s == pytest.approx(3.0 * (1 - MODEL_ERROR))
    assert passes.high_s == pytest.approx(4.5 * (1 + MODEL_ERROR))  # 3 s that no roof explains stay


def test_only_compute_faster_is_a_band_from_compute_to_memory_bound() -> None:
    passes = predict(STEP, HERE, HERE | {"compute": 1.0})[1].predicted
    assert passes.low_s == pytest.approx(3.0 * (1 - MODEL_ERROR))
    assert passes.high_s == pytest.approx(6.0 * (1 + MODEL_ERROR))
    assert passes.seconds == pytest.approx(4.0)


def test_communication_that_is_new_is_hidden_at_best() -> None:
    one = {"forward_backward": 6.0, "exposed_communication": 0.0}
    made = predict(one, {"compute": 3.0}, {"compute": 3.0, "all_reduce": 1.0})
    assert made[1].predicted == Prediction(1.0, 0.0, 2.0)
    assert predict(one | {"exposed_communication": 0.3}, {"compute": 3.0}, {"compute": 3.0})[1].because == "kept"
    gone = predict(STEP, HERE, {name: value for name, value in HERE.items() if name != "all_reduce"})
    assert gone[2].predicted == make_exact_prediction(0.0)


times = st.floats(1e-3, 1e3)


@given(
    st.dictionaries(st.sampled_from(sorted(PHASE_RESOURCES)), times),
    st.dictionaries(st.sampled_from(["compute", "memory", "all_reduce", "update", "storage"]), times),
    st.dictionaries(st.sampled_from(["compute", "memory", "all_reduce", "update", "storage"]), times),
)
def test_a_band_holds_its_prediction(phases: dict[str, float], here: dict[str, float], there: dict[str, float]) -> None:
    for phase in predict(phases, here, there):
        made = phase.predicted
        assert made.low_s <= made.seconds * (1 + 1e-9)
        assert made.low_s >= 0 or phase.because.startswith("unknown")
        assert made.seconds <= made.high_s * (1 + 1e-9)


def test_without_a_phase_of_communication_its_overlap_is_unknown() -> None:
    phase = predict({"forward_backward": 6.0}, HERE, HERE | {"all_reduce": 2.0})[-1]
    assert phase.predicted == Prediction(0.0, -0.5, 2.0)


def test_a_solution_is_steps_and_evaluations_and_what_does_not_change() -> None:
    step = Prediction(1.0, 0.5, 2.0)
    made = predict_solution(step, 10, evaluation=make_exact_prediction(3.0), staging_s=2.0, other_s=1.0)
    assert made == Prediction(16.0, 11.0, 26.0)
    assert made.holds(20.0)
    assert made.error(20.0) == pytest.approx(-0.2)
    assert compute_phase_factor(predict(STEP, HERE, HERE), "forward_backward").seconds == pytest.approx(1.0)
    assert compute_phase_factor([], "forward_backward") == make_exact_prediction(1.0)
