"""Parts of `precision/frozen_low`: frozen layers of a few bits."""
