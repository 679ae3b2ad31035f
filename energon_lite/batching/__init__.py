"""Which samples go together: strategies and plans, which are integers, and collation of samples into a batch."""
