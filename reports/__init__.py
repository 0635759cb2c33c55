"""Tables, figures, pages and documents made from runs; one folder per kind of report.

columns           every column of every table: meaning, unit, tables
markdown          Markdown tables and generated parts of documents
output_reference  the generated tables of docs/output.md
tables            a run as DataFrames
directory         write and read the directory of a run
"""
