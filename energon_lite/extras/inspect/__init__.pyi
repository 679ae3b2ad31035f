from .appearances import SampleHistory as SampleHistory
from .appearances import find_samples as find_samples
from .appearances import sample_history as sample_history
from .profiling import ProfileWindow as ProfileWindow
from .prometheus import PrometheusEndpoint as PrometheusEndpoint
from .sinks import MetricsFile as MetricsFile
from .sinks import TensorBoardFolder as TensorBoardFolder
from .sinks import WandbRun as WandbRun
