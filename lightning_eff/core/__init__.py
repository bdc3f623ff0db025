"""Code that every technique uses: facts and rules, the order of model changes, errors, small utilities.

Read first: technique.py (the interface), rules.py (the check of a set of techniques), managed.py (the base
of callbacks), model_surgery.py (changes of a model) and errors.py (messages).
"""
