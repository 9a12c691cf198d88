"""Training: every stage from a corpus to a checkpoint that the server loads.

Start a stage with `python -m kimijax.train STAGE --recipe RECIPE`. This folder imports `kimijax` and nothing of
`kimijax.serve`.
"""

# In a checkout this folder can be reached as `train` too; a second copy of every class under that name would follow.
if __name__ == "train":
    raise ImportError("import kimijax.train, not train")
