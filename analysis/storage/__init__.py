"""How results are kept on disk.

files          the name of every output file and what it holds
staged_writes  write a directory's files all together or not at all
progress       finished pieces of an interrupted computation
tensors        reading tensors so that sums over them come out the same every time
hashing        SHA-256 of files
"""
