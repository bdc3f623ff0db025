"""What `models/hf_causal_lm.py` asks about a model before it reads any weight."""
