"""Turn a command line into a checked config: overrides, recipes, what may be instantiated and written."""
