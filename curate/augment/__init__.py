"""Further texts made of those there are: by synonyms and by translation there and back, each checked."""
