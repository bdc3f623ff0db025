"""Adapters and the few bits that their base may be kept in: methods, where they go, what is saved of them."""
