"""From what was typed to a config: overrides, where recipes lie, what is instantiated, where runs write."""
