from .rebase import RebaseReport as RebaseReport
from .rebase import rebase_state as rebase_state
