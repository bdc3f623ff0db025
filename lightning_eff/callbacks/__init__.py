"""Techniques that go into `Trainer(callbacks=[...])`."""
