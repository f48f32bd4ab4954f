"""How a tensor lies over a mesh, and the cheapest way from one layout to another: placements, layouts, redistribution
steps, their prices, plans. Pure: nothing here knows a process group."""
