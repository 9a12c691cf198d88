"""The HTTP server: OpenAI-compatible routes over the engine of `kimijax.engine`.

Start it with `python -m kimijax.serve`. This folder imports `kimijax` and nothing of `kimijax.train`.
"""

# In a checkout this folder can be reached as `serve` too; a second copy of every class under that name would follow.
if __name__ == "serve":
    raise ImportError("import kimijax.serve, not serve")
