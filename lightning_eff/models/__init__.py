"""What the recipes train: plain LightningModules that know nothing of the suite."""
