"""Series of a run: every value of a short one, evenly spaced ones of a long one."""

from __future__ import annotations

from lightning_eff.report.history import NUM_POINTS, History, Validation


def test_a_long_series_is_thinned_evenly_and_keeps_its_last_stretch() -> None:
    history = History()
    for step in range(1, 100_001):
        history.add("a", step, 2.0 * step)
    history.add("b", 7, 1.0)
    series = history.series()
    points = series["a"]
    assert NUM_POINTS // 2 <= len(points) <= NUM_POINTS
    stride = points[0][0]
    assert points == [(stride * n, 2.0 * stride * n) for n in range(1, 100_000 // stride + 1)]
    assert series["b"] == [(7, 1.0)]


def test_a_metric_is_of_validation_if_it_appeared_while_one_ran() -> None:
    validation = Validation()
    validation.begin({"train_loss": 1.0})
    validation.end(5, {"train_loss": 1.0, "val_loss": 2.0})
    metrics = {"train_loss": 1.0, "val_loss": 2.0, "of_the_epoch": 3.0}
    validation.begin(metrics)
    validation.end(10, metrics | {"val_loss": 1.5, "rare": 4.0})
    assert validation.series() == {"val_loss": [(5, 2.0), (10, 1.5)], "rare": [(10, 4.0)]}
