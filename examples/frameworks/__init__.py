"""The loader inside other people's training loops: Lightning, Accelerate, and torch's distributed checkpoint."""
