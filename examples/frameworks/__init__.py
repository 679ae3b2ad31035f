"""The loader in other training loops: Hugging Face's Trainer, Accelerate, Lightning, torch's checkpoints."""
