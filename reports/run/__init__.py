"""The report of one run.

definitions  formulas, and the columns on the page
figures      figures of the measures
verdict      the verdict and the remarks: sentences made from the numbers
terminal     what the terminal shows
page         report.html
document     the summary as JSON
"""
