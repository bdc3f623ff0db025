"""What a user types: one module a verb."""
