"""Measure a run's time, memory, FLOPs and attention, and show them as a table and an HTML page.

`EfficiencyReport` (monitors/efficiency_report.py) uses this package. To change a figure, read `meter.py`
first. The meter selects the batches that are counted and timed. It counts operations with `flops.py` and
`attention.py`, and storages with `recording.py`. `recording.py` builds on `live_bytes.py` and
`module_tracker.py`, and `peak.py` replays the records. `step_time.py` times the parts of a step, `history.py`
collects curves, and `logged.py` sends figures to loggers.

To change the presentation, read `display.py` (sentences, terminal text, HTML page), `charts.py`,
`report.html.j2` and `files.py`. `advice.py` suggests techniques, and predicts their savings from the recorded
steps. The planner applies the same counters to steps on fake tensors. `model_weights.py` and
`sharding.py` compute the memory per device for many devices; each strategy implements `Sharding`.
"""
