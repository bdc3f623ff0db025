"""What a composed run would take, before it is started: memory, shares of many devices, advice."""
