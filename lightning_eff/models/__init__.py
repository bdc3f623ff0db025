"""Models of the recipes: plain LightningModules that import nothing of the suite."""
