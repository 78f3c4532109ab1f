"""A decoder with fewer tokens: those that are spelled by others leave the tokenizer, the embedding and the head."""
