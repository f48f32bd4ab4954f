"""Layouts decided for a whole program at once: a compiled frame, or a model on a batch.

record its operators (`recording.py`) -> solve for all layouts together (`deciding.py`) -> `dispatch.whole_graph`
"""
