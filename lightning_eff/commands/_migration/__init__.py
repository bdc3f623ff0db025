"""What `migrate` knows: a YAML table per tool, and the engine that reads them.

Read first: shared.yaml (what a row means), transformers.yaml, then tables and engine.
"""
