"""torchvision, also where its compiled operators do not fit this torch (a build for CUDA beside one without): the
transforms need none of them, but importing it declares what they would do."""

import sys

import torch

_operators = []
for name in ("nms", "qnms"):
    try:
        import torchvision  # noqa: F401
    except ImportError:
        break
    except RuntimeError as error:
        for module in [module for module in sys.modules if module.partition(".")[0] == "torchvision"]:
            del sys.modules[module]
        if f"torchvision::{name} does not exist" not in str(error):
            break
        _operators.append(torch.library.Library("torchvision", "FRAGMENT"))
        _operators[-1].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
