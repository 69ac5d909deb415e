"""BABILong: facts of bAbI stories hidden in long texts, and questions about them."""
