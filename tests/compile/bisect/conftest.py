"""The benches on which the tests of passes trace graphs."""

from tests.passes.conftest import bench, cube

__all__ = ["bench", "cube"]
