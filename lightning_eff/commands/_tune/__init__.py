"""The search of `tune`: what is tried, what fits, and which of it is the fastest."""
