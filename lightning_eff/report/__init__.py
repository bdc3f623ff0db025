"""Measure the cost of a run (time, bytes, FLOPs, attention) and show it as a table and a page.

`monitors/efficiency_report.py` calls all of it. To change a figure, read `meter.py` first: it selects the
batches to count and to time. It counts with `flops.py` and `attention.py` (each operation), `recording.py`
(each storage; it builds on `live_bytes.py` and `module_tracker.py`) and `peak.py` (replays a record).
`step_time.py` times the parts of a step, `history.py` collects curves, and `logged.py` sends figures to
loggers.

To change the presentation, read `display.py` (words, terminal, page), `charts.py`, `report.html.j2` and
`files.py`. `advice.py` suggests techniques by replaying a record. The planner predicts with the same
counters, on fake tensors. `model_weights.py` and `sharding.py` are its arithmetic for many devices, which the
strategies implement.
"""
