"""The loader that a run trains with: seen, replaced, read ahead."""
