"""Tools for testing sharded code: small models, ranks as processes or threads, placements by the dozen, counting,
sharding rules by brute force.

Public, for the tests of users' own models as well; the library itself does not stand on it, but for
`dtensor.tools.demo`.
"""

from .counting import Collective, CountCollectives
from .debug_mode import DebugMode
from .fake import fake_ranks
from .models import Attention, FeedForward, MLPModule, MLPStacked, ModelArgs, RMSNorm, Transformer, TransformerBlock
from .processes import RankError, kept_ranks, run_ranks
from .ranks import with_ranks, with_threads
from .rules.candidates import Case, wrong_candidates
from .rules.converter import ShardingConverter
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
    "RMSNorm",
    "RankError",
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
