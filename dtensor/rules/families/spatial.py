"""Operators on images and signals: pooling, resampling, padding. Batch and channels may be sharded, space may not.

A window reaches into neighbouring shards, and resampling rounds by the global size. Where pixels stay together (pixel
shuffle) or are independent (the grid of a grid sampler), space may be sharded as well.
"""

from typing import Any

from ..pattern import Pattern, pattern_rules

FIRST = ({0},)


def _by_dims(name: str, numbers: tuple[int, ...], text: str, **rest: Any) -> dict[str, Pattern]:
    """The same pattern for each of `numbers` spatial dims, which `s` in `text` stands for."""
    return {name.format(n): Pattern(text.replace("s", "_" * n), **rest) for n in numbers}


POOLS = {
    **_by_dims("max_pool{}d_with_indices", (2, 3), "*s -> *s, *s"),
    **_by_dims("max_pool{}d_with_indices_backward", (2, 3), "*s, *s, *s -> *s", linear=FIRST, unread=(1,)),
    **_by_dims("avg_pool{}d", (2, 3), "*s -> *s", linear=FIRST, rounds=True),
    **_by_dims("avg_pool{}d_backward", (2, 3), "*s, *s -> *s", linear=FIRST, rounds=True, unread=(1,)),
    **_by_dims("_adaptive_avg_pool{}d", (2, 3), "*s -> *s", linear=FIRST),
    **_by_dims("_adaptive_avg_pool{}d_backward", (2, 3), "*s, *s -> *s", linear=FIRST, unread=(1,)),
    **_by_dims("adaptive_max_pool{}d", (2, 3), "*s -> *s, *s"),
    **_by_dims("adaptive_max_pool{}d_backward", (2, 3), "*s, *s, *s -> *s", linear=FIRST, unread=(1,)),
    **_by_dims("fractional_max_pool{}d", (2, 3), "ncs, nc_ -> ncs, ncs"),
    **_by_dims("fractional_max_pool{}d_backward", (2, 3), "*s, *s, *s -> *s", linear=FIRST, unread=(1,)),
    **_by_dims("max_unpool{}d", (2, 3), "*s, *s -> *s", linear=FIRST),
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
    **{k: v for f, n in UPSAMPLED.items() for k, v in _by_dims(f, n, "ncs -> ncs", linear=FIRST).items()},
    **{
        k: v
        for f, n in UPSAMPLED.items()
        for k, v in _by_dims(f"{f}_backward", n, "ncs -> ncs", linear=FIRST, shape_arg="input_size").items()
    },
    "grid_sampler_2d": Pattern("nc__, nhw_ -> nchw", linear=FIRST),
    "grid_sampler_2d_backward": Pattern(
        "nchw, nc__, nhw_ -> nc__, nhw_", linear=FIRST, reduce={"c": "sum", "h": "sum", "w": "sum"}
    ),
    "grid_sampler_3d": Pattern("nc___, ndhw_ -> ncdhw", linear=FIRST),
    "grid_sampler_3d_backward": Pattern(
        "ncdhw, nc___, ndhw_ -> nc___, ndhw_", linear=FIRST, reduce=dict.fromkeys("cdhw", "sum")
    ),
}

PADDED = {
    **_by_dims("reflection_pad{}d", (1, 2, 3), "*s -> *s", linear=FIRST),
    **_by_dims("reflection_pad{}d_backward", (1, 2, 3), "*s, *s -> *s", linear=FIRST, unread=(1,)),
    **_by_dims("replication_pad{}d", (1, 2, 3), "*s -> *s", linear=FIRST),
    **_by_dims("replication_pad{}d_backward", (1, 2, 3), "*s, *s -> *s", linear=FIRST, unread=(1,)),
}

REARRANGED = {
    "pixel_shuffle": Pattern(
        "*(crs)hw -> *c(hr)(ws)", linear=FIRST, sizes={"r": "upscale_factor", "s": "upscale_factor"}
    ),
    "pixel_unshuffle": Pattern(
        "*c(hr)(ws) -> *(crs)hw", linear=FIRST, sizes={"r": "downscale_factor", "s": "downscale_factor"}
    ),
    "channel_shuffle": Pattern("n_* -> n_*", linear=FIRST),
    "im2col": Pattern("*c__ -> *(ck)_", linear=FIRST),
    "col2im": Pattern("*(ck)_ -> *c__", linear=FIRST),
}

pattern_rules({**POOLS, **RESAMPLED, **PADDED, **REARRANGED})

__all__ = ["PADDED", "POOLS", "REARRANGED", "RESAMPLED", "UPSAMPLED"]
