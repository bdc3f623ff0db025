"""Adapters and what a checkpoint keeps of them: what PEFT does not do itself.

To change LoRA, read `callbacks/peft_adapter.py` (the technique), `inject.py` (PEFT's configs and targets, and
the replacement of layers), `lora_linear.py` (LoRA's product) and `adapter_checkpoint.py` (what a checkpoint
holds, the digests of the frozen base, and the check when it is loaded). `export.py` writes PEFT's own format;
`layers.py` finds layers without importing PEFT.
"""

CHECKPOINT_KEY = "peft_adapter"
"""Where a checkpoint keeps a method's config and the fingerprint of its base."""
