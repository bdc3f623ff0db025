"""An optimizer step in parts: windows, micro-batches, retries when memory runs out, on one rank or many."""
