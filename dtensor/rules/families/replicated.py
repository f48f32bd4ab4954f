"""Lists the operators that have no rule and run replicated, with the reason for each."""

from ...torch_private.core import OpOverload
from ..call import base_name

VALUES = "its result is a number, or has a shape, that depends on all values"
ORDER = "it runs through the tensor as one sequence"
DRAWS = "the numbers it draws depend on all probabilities"
RAGGED = "segments of different lengths cross shard boundaries"
ALGORITHM = "the algorithm runs over all of its data"

WHOLE: dict[str, str] = {
    **dict.fromkeys(
        [
            "_local_scalar_dense",
            "allclose",
            "bincount",
            "equal",
            "index",
            "is_nonzero",
            "item",
            "masked_select",
            "nonzero",
            "nonzero_static",
            "repeat_interleave",
            "unique_consecutive",
            "unique_dim",
            "unique_dim_consecutive",
            "_unique",
            "_unique2",
        ],
        VALUES,
    ),
    **dict.fromkeys(["hash_tensor", "nonzero_numpy", "_pdist_forward", "_pdist_backward"], ORDER),
    **dict.fromkeys(["binomial", "multinomial", "poisson", "_sample_dirichlet", "_standard_gamma"], DRAWS),
    **dict.fromkeys(
        [
            "segment_reduce",
            "_segment_reduce_backward",
            "_ctc_loss",
            "_ctc_loss_backward",
            "_embedding_bag",
            "_embedding_bag_backward",
            "_embedding_bag_dense_backward",
            "_embedding_bag_forward_only",
            "_embedding_bag_per_sample_weights_backward",
        ],
        RAGGED,
    ),
    **dict.fromkeys(
        [
            "histogram",
            "_histogramdd_bin_edges",
            "_histogramdd_from_bin_cts",
            "_histogramdd_from_bin_tensors",
            "linalg_lstsq",
            "_trilinear",
        ],
        ALGORITHM,
    ),
}
"""Operator -> why it has no sharding rule."""

BY_MEANING = (VALUES, ORDER, DRAWS)
"""Reasons that no rule could remove: gathering the arguments is then what the user asked for, not a fallback."""


def needs_whole(func: OpOverload) -> bool:
    """Whether an operator needs unsharded tensors by definition, so that gathering them does not deserve a warning."""
    return WHOLE.get(base_name(func).removeprefix("aten::")) in BY_MEANING


__all__ = ["WHOLE", "needs_whole"]
