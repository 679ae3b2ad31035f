"""A Megatron-style reference trainer, which uses only the public names of the loader."""
