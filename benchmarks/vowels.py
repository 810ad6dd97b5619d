"""A reward that a model with random weights can learn: the share of vowels."""


def score(completion: str, answer: str) -> float:
    """Return the share of the characters of `completion` that are lower-case vowels."""
    return sum(completion.count(vowel) for vowel in "aeiou") / max(len(completion), 1)
