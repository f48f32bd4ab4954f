"""Meshes and their links, the `Spec` of a tensor on a mesh, and what a trace notes about tensors."""
