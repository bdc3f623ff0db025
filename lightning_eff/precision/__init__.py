"""Number formats: techniques for `Trainer(plugins=[...])`, at most one of them per run."""
