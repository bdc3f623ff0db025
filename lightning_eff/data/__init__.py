"""What the recipes train on: plain LightningDataModules that know nothing of the suite."""
