"""Techniques for `Trainer(callbacks=[...])`, one per module.

A module with a leading underscore is a private part of the techniques that import it.
"""
