"""Files that survive: written in one step, verified before they are read, plain values and never code."""
