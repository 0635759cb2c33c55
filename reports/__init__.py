"""Tables, figures, pages and documents made from runs; one room per kind of report.

markdown          Markdown tables and generated parts of documents
columns           every column of every table: meaning, unit, tables
output_reference  the generated tables of docs/output.md
html              pages in one file that load nothing from anywhere
tables            a run as DataFrames
run               verdict, definitions, figures and page of a run
causal            tables and figures of what edits cost
compare           runs side by side
neuron            the page of one neuron
theory            the claims of the theory, predicted and measured
directory         write and read the directory of a run
findings          the tables and the figure of docs/findings.md
"""
