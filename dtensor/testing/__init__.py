"""Tools for testing sharded code: small models, ranks as processes or threads, enumeration of placements, counts of
collectives, and brute-force checks of sharding rules.

The package is public, so that users can test their own models with it. Within the library only `dtensor.tools` uses it.
"""

from .counting import Collective, CountCollectives
from .debug_mode import DebugMode
from .fake import fake_ranks
from .models import Attention, FeedForward, MLPModule, MLPStacked, ModelArgs, RMSNorm, Transformer, TransformerBlock
from .processes import RankError, kept_ranks, run_ranks
from .ranks import with_ranks, with_threads
from .rules.candidates import Case, wrong_candidates
from .rules.converter import ShardingConverter
from .simulation.per_rank import PerRank
from .simulation.ranks import Ranks
from .threads import run_threads

__all__ = [
    "Attention",
    "Case",
    "Collective",
    "CountCollectives",
    "DebugMode",
    "FeedForward",
    "MLPModule",
    "MLPStacked",
    "ModelArgs",
    "PerRank",
    "RMSNorm",
    "RankError",
    "Ranks",
    "ShardingConverter",
    "Transformer",
    "TransformerBlock",
    "fake_ranks",
    "kept_ranks",
    "run_ranks",
    "run_threads",
    "with_ranks",
    "with_threads",
    "wrong_candidates",
]
