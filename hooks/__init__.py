"""Models, texts, and the hooks that read one with the other."""

import analysis  # noqa: F401  what it sets for threads must be set before torch is imported
