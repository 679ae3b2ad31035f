from .appearances import SampleHistory as SampleHistory
from .appearances import find_samples as find_samples
from .appearances import sample_history as sample_history
from .profiling import ProfileWindow as ProfileWindow
from .progress import MetricsFile as MetricsFile
from .progress import TensorBoardFolder as TensorBoardFolder
from .progress import WandbRun as WandbRun
from .prometheus import PrometheusEndpoint as PrometheusEndpoint
