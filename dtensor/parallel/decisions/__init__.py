"""Layouts decided for a whole compiled frame at once.

record its operators (`recording.py`) -> solve for all layouts together (`deciding.py`) -> `dispatch.whole_graph`
"""
