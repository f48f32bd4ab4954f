"""Meshes and their process groups, what ranks know about each other, and the `Spec` of a tensor on a mesh."""
