"""Shared by both strategies that shard a model: checks of the model, and collectives."""
