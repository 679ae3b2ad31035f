from .profiling import ProfileWindow as ProfileWindow
from .prometheus import PrometheusEndpoint as PrometheusEndpoint
from .sample_history import SampleHistory as SampleHistory
from .sample_history import find_samples as find_samples
from .sample_history import sample_history as sample_history
from .sinks import MetricsFile as MetricsFile
from .sinks import TensorBoardFolder as TensorBoardFolder
from .sinks import WandbRun as WandbRun
