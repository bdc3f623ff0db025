"""Private parts of callbacks/exact_resume."""
