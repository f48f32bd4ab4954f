"""Layouts decided for a whole program at once: for a frame that is compiled, or a model that runs eagerly on a batch.

record its operators (`recording.py`) -> solve for all layouts together (`deciding.py`) -> `dispatch.whole_graph`
"""
