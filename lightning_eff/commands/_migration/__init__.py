"""The keys of other tools as YAML tables, one per tool, and the engine by which `migrate` applies them.

Read first: shared.yaml (what a row means), transformers.yaml, then tables.py and engine.py.
"""
