"""The parts of `data/text.py`: documents from files, their tokens, packed rows, and a loader that resumes."""
