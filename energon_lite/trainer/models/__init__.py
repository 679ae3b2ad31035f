"""The models: configuration, layers and loss, sharded over the ranks of a mesh."""
