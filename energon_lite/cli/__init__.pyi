from .dataset_arguments import batching_argument as batching_argument
from .jobs import job_options as job_options
from .jobs import json_object as json_object
from .jobs import progress as progress
from .jobs import show_share as show_share
from .local_paths import ExistingPath as ExistingPath
from .tables import aligned as aligned
from .task_encoder_argument import make_task_encoder as make_task_encoder
