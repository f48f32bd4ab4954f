"""How a tensor is distributed over a mesh, and how to get from one layout to another at the lowest cost.

Contains placements, layouts, redistribution steps, the cost model and the planner. Everything here is pure: nothing
depends on a process group.
"""
