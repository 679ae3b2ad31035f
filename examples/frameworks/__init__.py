"""The loader inside other people's loops: Hugging Face's Trainer, Accelerate, Lightning, torch's checkpoints."""
