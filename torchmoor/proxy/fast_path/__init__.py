"""The fast path: the most common request in few steps, to the same effect as the general path.

Delete this package, its line in run/data_plane.py and every `take_over` to be without it.
"""
