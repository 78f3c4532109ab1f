"""Questions about everyday things, a thousand, the same on every machine: something to ask a model that is to answer in
its own way, when a draft network learns from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_FORMS = (
    "Tell me about {}.",
    "What do people like about {}?",
    "How do I begin with {}?",
    "Write a short story about {}.",
    "Give me five ideas about {}.",
    "Write a letter to a friend about {}.",
    "Explain {} to a child.",
    "What should I know about {}?",
    "Why is {} important?",
    "Write a poem about {}.",
)
_THINGS = """
    music, gardening, the sea, dogs, cats, cooking pasta, chess, winter, bicycles, learning a language, running,
    the moon, volcanoes, ancient Rome, poetry, painting, coffee, tea, bread, travel by train, mountains, rivers, birds,
    photography, computers, programming, databases, teaching, medicine, sleep, health, money, friendship, family, work,
    job interviews, school, university, physics, chemistry, biology, mathematics, statistics, robots, cars, planes,
    ships, cities, villages, farming, forests, deserts, rain, snow, weather, climate, energy, electricity, light, sound,
    colour, dance, theatre, films, novels, newspapers, radio, television, the internet, telephones, letters, gifts,
    birthdays, weddings, holidays, festivals, fruit, vegetables, cheese, soup, cakes, restaurants, markets, shops,
    clothes, shoes, houses, furniture, tools, games, football, tennis, swimming, yoga, happiness, fear, courage,
    patience, honesty, time, memory
"""


def questions() -> Iterator[dict[str, Any]]:
    """Rows with a "prompt" alone."""
    things = [" ".join(each.split()) for each in _THINGS.split(",")]
    for form in _FORMS:
        for thing in things:
            yield {"prompt": [{"role": "user", "content": form.format(thing)}]}
