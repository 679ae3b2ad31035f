"""Entry points of the extra ``many_leaves``."""

BLEND_OPENERS = {"many_leaves": "energon_lite.extras.many_leaves.opening:open_blend"}
