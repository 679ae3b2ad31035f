"""Which samples a run was trained on: what was planned against what was recorded, and where a sample comes."""
