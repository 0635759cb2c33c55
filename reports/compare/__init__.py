"""The comparison of several runs.

tables   differences from the first run, and the verdict in words
figures  all runs by depth, and differences by layer
page     compare.html, JSON and the terminal
"""
