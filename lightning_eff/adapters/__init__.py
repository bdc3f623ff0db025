"""Adapters, and their checkpoints: the parts that PEFT does not do itself.

To change LoRA, read `callbacks/peft_adapter.py` (the technique), `inject.py` (PEFT's configs and targets, and
the replacement of layers), `lora_linear.py` (LoRA's product) and `adapter_checkpoint.py` (a checkpoint's
content, the digests of the frozen base, and the check on loading). `export.py` writes PEFT's own format;
`layers.py` finds layers without importing PEFT.
"""

CHECKPOINT_KEY = "peft_adapter"
"""Key in a checkpoint for a method's config and the fingerprint of its base."""
