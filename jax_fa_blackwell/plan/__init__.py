"""Which kernel runs, with which tiles, and how it is launched; no CUDA and no kernel DSL is imported here."""
