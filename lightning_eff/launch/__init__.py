"""Start the ranks of a run, stop them together, and end them together when one fails."""
