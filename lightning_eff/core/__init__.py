"""Used by every technique: its facts and rules, the order of model changes, errors, and small utilities.

Read first: technique.py (the interface), rules.py (the verdict on a set of techniques), managed.py (the base
of callbacks), model_surgery.py (changes of a model) and errors.py (messages).
"""
