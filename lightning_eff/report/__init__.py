"""Count what a run costs, and show it: time, bytes, FLOPs, attention; a table and a page.

`monitors/efficiency_report.py` calls all of it. To change a figure, read `meter.py` (one fit: which batches
are counted, which are timed), then what it counts with: `flops.py` and `attention.py` (each operation),
`recording.py` (each storage: `live_bytes.py` and `module_tracker.py` are below it) and `peak.py` (the replay
of a record). Curves come from `history.py`, what loggers get from `logged.py`.

To change what is shown, read `display.py` (words, terminal, page), `charts.py`, `report.html.j2` and
`files.py`. `advice.py` suggests techniques by replaying a record.

The planner predicts with the same counters, on fake tensors. `model_weights.py` and `sharding.py` are its
arithmetic for many devices, which the strategies implement.
"""
