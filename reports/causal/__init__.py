"""The costs of edits in one run.

tables   costs as tables, and as columns of the other tables
figures  figures of costs
summary  costs in words, and the terminal
"""
