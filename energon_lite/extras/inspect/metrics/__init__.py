"""Where the numbers of loaders and trainers go: a file, a page for Prometheus, TensorBoard, Weights & Biases."""
