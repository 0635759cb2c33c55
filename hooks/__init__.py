"""Models, texts, and the hooks that read one with the other."""
