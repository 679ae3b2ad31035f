from .auditing.sample_history import SampleHistory as SampleHistory
from .auditing.sample_history import find_samples as find_samples
from .auditing.sample_history import sample_history as sample_history
from .metrics.metrics_file import MetricsFile as MetricsFile
from .metrics.prometheus_endpoint import PrometheusEndpoint as PrometheusEndpoint
from .metrics.tensorboard_folder import TensorBoardFolder as TensorBoardFolder
from .metrics.wandb_run import WandbRun as WandbRun
