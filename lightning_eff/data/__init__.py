"""Data of the recipes: plain LightningDataModules that import nothing of the suite."""
