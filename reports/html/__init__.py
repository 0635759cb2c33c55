"""HTML pages that need no network, with everything from outside escaped.

render        templates, escaping, numbers and figures on a page
packed_table  a table of numbers packed for a page's script
"""
