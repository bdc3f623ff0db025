"""Data of the recipes: plain LightningDataModules that import nothing from this package's techniques."""
