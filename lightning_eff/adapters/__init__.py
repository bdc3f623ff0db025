"""The parts of adapters and their checkpoints that PEFT itself does not provide.

To change LoRA, start with the technique in `callbacks/peft_adapter.py`. `inject.py` replaces layers by PEFT's
adapted layers, and `lora_linear.py` computes LoRA's product. `adapter_checkpoint.py` defines the content of a
checkpoint, the digests of the frozen base, and the check on loading. `export.py` writes PEFT's own format.
`layers.py` finds layers without importing PEFT.
"""

CHECKPOINT_KEY = "peft_adapter"
"""Key in a checkpoint for the config of the adapter method and the fingerprint of the base."""
