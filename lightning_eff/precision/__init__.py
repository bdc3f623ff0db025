"""Number formats: techniques for `Trainer(plugins=[...])`, at most one per run."""
