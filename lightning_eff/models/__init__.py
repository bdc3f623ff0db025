"""Models of the recipes: plain LightningModules that import nothing from this package's techniques."""
