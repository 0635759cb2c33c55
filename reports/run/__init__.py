"""The report of one run.

definitions  formulas, and the columns on the page
figures      figures of the measures
summary      verdict and remarks in words, and the terminal
page         report.html
document     the summary as JSON
"""
