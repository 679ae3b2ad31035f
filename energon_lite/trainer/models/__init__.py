"""The models: their shape, their layers, and the loss, cut over the ranks of a mesh."""
