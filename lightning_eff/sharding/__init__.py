"""What strategies that divide a model among ranks share: configuration, checkpoints, arithmetic."""
