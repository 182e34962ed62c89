"""Episodes: conversations with an environment or with tools."""
