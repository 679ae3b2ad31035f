"""Who is where among the ranks, and of what whole tensors their parts are parts."""
