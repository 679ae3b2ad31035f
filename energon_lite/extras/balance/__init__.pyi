import energon_lite.entry_points

from .cost_fit import CostFit as CostFit
from .cost_fit import fit_costs as fit_costs
from .cost_fit import read_cost_model as read_cost_model
from .cost_fit import read_micro_batches as read_micro_batches
from .cost_fit import write_cost_model as write_cost_model
from .cost_model import CostModel as CostModel
from .cost_model import Quadratic as Quadratic
from .image_columns import ImagePatches as ImagePatches
from .micro_batch_times import MicroBatchTimes as MicroBatchTimes
from .shared_images import EncoderPlan as EncoderPlan
from .shared_images import image_exchange as image_exchange

COLUMNS: dict[str, energon_lite.entry_points.Columns]
