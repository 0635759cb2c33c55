"""How results are kept on disk.

files          the name of every output file and what it holds
staged_writes  write a directory's files all together or not at all
progress       finished pieces of an interrupted computation
hashing        SHA-256 of files
"""
