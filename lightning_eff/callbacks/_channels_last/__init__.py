"""Parts of callbacks/channels_last."""
