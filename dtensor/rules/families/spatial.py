"""Operators on images and signals: pooling, resampling, padding. Batch and channels may be sharded, space may not.

A window reaches into neighbouring shards, and resampling rounds by the global size. Where pixels stay together (pixel
shuffle) or are independent (the grid of a grid sampler), space may be sharded as well.
"""

from typing import Any

from ..bind import rule_for, rule_table
from ..call import Call
from ..local_calls import unless_empty
from ..notation import LibraryRule, Rule, library_rule


def _by_dims(name: str, numbers: tuple[int, ...], text: str, **options: Any) -> dict[str, Rule]:
    """The same rule for each of `numbers` spatial dims, which S in `text` stands for."""
    return {name.format(n): LibraryRule(text.replace("S", "1" * n), **options) for n in numbers}


POOLS = {
    **_by_dims("max_pool{}d_with_indices", (2, 3), "...S->...S,...S"),
    **_by_dims("max_pool{}d_with_indices_backward", (2, 3), "...S,...S,...S->...S", linear=0, unread=1),
    **_by_dims("avg_pool{}d", (2, 3), "...S->...S", linear=0, rounds=True),
    **_by_dims("avg_pool{}d_backward", (2, 3), "...S,...S->...S", linear=0, rounds=True, unread=1),
    **_by_dims("_adaptive_avg_pool{}d", (2, 3), "...S->...S", linear=0),
    **_by_dims("_adaptive_avg_pool{}d_backward", (2, 3), "...S,...S->...S", linear=0, unread=1),
    **_by_dims("adaptive_max_pool{}d", (2, 3), "...S->...S,...S"),
    **_by_dims("adaptive_max_pool{}d_backward", (2, 3), "...S,...S,...S->...S", linear=0, unread=1),
    **_by_dims("fractional_max_pool{}d_backward", (2, 3), "...S,...S,...S->...S", linear=0, unread=1),
    **_by_dims("max_unpool{}d", (2, 3), "...S,...S->...S", linear=0),
}

UPSAMPLED: dict[str, Any] = {
    "upsample_nearest{}d": (1, 2, 3),
    "_upsample_nearest_exact{}d": (1, 2, 3),
    "upsample_linear{}d": (1,),
    "upsample_bilinear{}d": (2,),
    "upsample_bicubic{}d": (2,),
    "upsample_trilinear{}d": (3,),
    "_upsample_bilinear{}d_aa": (2,),
    "_upsample_bicubic{}d_aa": (2,),
    "_upsample_lanczos{}d_aa": (2,),
}
"""Resampling operator -> the numbers of spatial dims for which it exists."""

RESAMPLED = {
    **{k: v for f, n in UPSAMPLED.items() for k, v in _by_dims(f, n, "ncS->ncS", linear=0).items()},
    **{
        k: v
        for f, n in UPSAMPLED.items()
        for k, v in _by_dims(f"{f}_backward", n, "ncS->ncS", linear=0, shape_arg="input_size").items()
    },
    "grid_sampler_2d": LibraryRule("nc11,nhw1->nchw", linear=0),
    "grid_sampler_2d_backward": LibraryRule("nchw,nc11,nhw1->nc11,nhw1", linear=0, reduce="chw"),
    "grid_sampler_3d": LibraryRule("nc111,ndhw1->ncdhw", linear=0),
    "grid_sampler_3d_backward": LibraryRule("ncdhw,nc111,ndhw1->nc111,ndhw1", linear=0, reduce="cdhw"),
}

PADDED = {
    **_by_dims("reflection_pad{}d", (1, 2, 3), "...S->...S", linear=0),
    **_by_dims("reflection_pad{}d_backward", (1, 2, 3), "...S,...S->...S", linear=0, unread=1),
    **_by_dims("replication_pad{}d", (1, 2, 3), "...S->...S", linear=0),
    **_by_dims("replication_pad{}d_backward", (1, 2, 3), "...S,...S->...S", linear=0, unread=1),
}

REARRANGED = {
    "pixel_shuffle": Rule("...(crs)hw->...c(hr)(ws)", linear=0, sizes={"r": "upscale_factor", "s": "upscale_factor"}),
    "pixel_unshuffle": Rule(
        "...c(hr)(ws)->...(crs)hw", linear=0, sizes={"r": "downscale_factor", "s": "downscale_factor"}
    ),
    "channel_shuffle": Rule("n1...->n1...", linear=0),
    "im2col": Rule("...c11->...(ck)1", linear=0),
    "col2im": Rule("...(ck)1->...c11", linear=0),
}

rule_table(__name__, {**POOLS, **RESAMPLED, **PADDED, **REARRANGED}, local=unless_empty)


@rule_for("fractional_max_pool2d", "fractional_max_pool3d")
def fractional_pool(call: Call) -> Rule:
    """A pool whose windows are drawn for each sample and channel; without a batch it is replicated."""
    full = "nc" + "1" * (call["self"].ndim - 2)
    batched = call["self"].ndim - 2 == len(call["kernel_size"])
    return library_rule(f"{full},nc1->{full},{full}" if batched else "*,*->*,*", local=unless_empty)


__all__ = ["PADDED", "POOLS", "REARRANGED", "RESAMPLED", "UPSAMPLED"]
