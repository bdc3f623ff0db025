"""The parts of `data/text.py`: documents, their tokens in a cache or a stream, rows, a resumable loader."""
