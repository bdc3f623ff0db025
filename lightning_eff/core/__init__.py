"""What every technique stands on: what it states about itself, rules, the order of changes, errors."""
