"""Executors for the places corral ships with, all built on one supervisor, the warden.

`corral.load_backend("local")` finds them by name; importing this package imports none of them.
"""
