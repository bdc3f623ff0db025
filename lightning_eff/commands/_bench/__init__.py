"""What `lightning-eff bench` measures, and how."""
