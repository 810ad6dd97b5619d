"""Your own reward: the share of the completion's letters that are vowels."""


def score(completion: str) -> float:
    letters = [c for c in completion.lower() if c.isalpha()]
    return sum(c in "aeiou" for c in letters) / len(letters) if letters else 0.0
