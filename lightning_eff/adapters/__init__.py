"""Adapters and quantized base layers: PEFT's methods, where they go, and what a checkpoint keeps of them."""
