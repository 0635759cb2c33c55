"""The claims of theory and their checks.

tables   claims, theorems and sizes: tables, terminal, JSON, files
figures  the units and their exchange and scaling
"""
