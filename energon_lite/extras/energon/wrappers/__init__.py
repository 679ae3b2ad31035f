"""Data sets made of other data sets: limited, repeated, mixed, mapped. Each is a plan over the inner items."""
