"""The mesh and its process groups, what ranks know of each other, and what is known of a tensor on a mesh (`spec`)."""
