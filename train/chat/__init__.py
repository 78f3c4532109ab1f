"""Conversations and preferences: from files to tokens that say which of them are learnt."""
