"""Order of samples: from a position to an address, in closed form. Integers only: no I/O, no torch.

``permutation`` shuffles, ``blend`` mixes leaves, ``shuffle`` orders one leaf, and ``orders`` combines them. Every
function here returns the same values in every process, on every machine and in every release. If that has to change,
``ORDER_VERSION`` changes with it, and states saved under another version are refused.
"""
