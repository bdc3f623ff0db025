"""The processes of a run on several devices: who starts them, what each may say, how they end together."""
