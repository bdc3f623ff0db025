"""Adapters and quantized base layers: PEFT's methods, where they go, and what a checkpoint keeps of them.

To change LoRA, read `callbacks/peft_adapter.py` (the technique), `methods.py` (PEFT's configs and options),
`targets.py` and `inject.py` (which layers, and their replacement), `adapter_checkpoint.py` (what a checkpoint
holds, and its check when it is loaded) and `base_fingerprint.py` (the frozen base that it must meet).
"""

CHECKPOINT_KEY = "peft_adapter"
"""Where a checkpoint keeps a method's config and the fingerprint of its base."""
