from energon_lite.batching.transformer_shape import TransformerShape as TransformerShape

from .cost_file import read_cost_model as read_cost_model
from .cost_file import read_micro_batches as read_micro_batches
from .cost_file import write_cost_model as write_cost_model
from .cost_fit import CostFit as CostFit
from .cost_fit import fit_costs as fit_costs
from .cost_model import CostModel as CostModel
from .cost_model import Quadratic as Quadratic
from .encoder_plan import EncoderPlan as EncoderPlan
from .image_exchange import image_exchange as image_exchange
from .image_patches import ImagePatches as ImagePatches
from .micro_batch_times import MicroBatchTimes as MicroBatchTimes
