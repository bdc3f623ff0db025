"""Used by `migrate`: a YAML table of keys per tool, and the engine that applies them.

Read first: shared.yaml (what a row means), transformers.yaml, then tables and engine.
"""
