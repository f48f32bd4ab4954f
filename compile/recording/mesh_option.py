"""The option `--mesh` of commands: the sizes of the axes of a mesh that is not there."""

import re

import click


class MeshOption(click.ParamType):
    """Sizes of mesh axes: `dp=128,tp=8`."""

    name = "axis=size,..."

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        if isinstance(value, dict):
            return value
        found = [re.fullmatch(r"(\w+)=([1-9]\d*)", word.strip()) for word in str(value).split(",")]
        if not all(found) or len({m[1] for m in found if m}) < len(found):
            self.fail(f"{value!r} does not give sizes to axes; write, for example, dp=128,tp=8", param, ctx)
        return {m[1]: int(m[2]) for m in found if m}


__all__ = ["MeshOption"]
