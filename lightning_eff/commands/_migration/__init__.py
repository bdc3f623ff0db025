"""YAML tables of the keys of other tools, one table per tool, and the engine of `migrate`.

Read first: shared.yaml (what a row means), transformers.yaml, then tables.py and engine.py.
"""
