"""Code for both sharding strategies: checks of the model, collectives, and Fabric's checkpoints."""
