"""The engine: token ids in, token ids out. It knows no text."""
