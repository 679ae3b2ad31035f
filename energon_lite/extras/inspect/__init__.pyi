from .auditing.sample_history import SampleHistory as SampleHistory
from .auditing.sample_history import find_samples as find_samples
from .auditing.sample_history import sample_history as sample_history
from .metrics.prometheus_endpoint import PrometheusEndpoint as PrometheusEndpoint
from .metrics.sinks import MetricsFile as MetricsFile
from .metrics.sinks import TensorBoardFolder as TensorBoardFolder
from .metrics.sinks import WandbRun as WandbRun
from .profiling import ProfileWindow as ProfileWindow
