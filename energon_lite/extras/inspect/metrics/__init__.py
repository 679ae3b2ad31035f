"""Sinks for the numbers of loaders and trainers: a file, Prometheus, TensorBoard, Weights & Biases."""
